"""Will a calibrated run fit? Counted before it starts, from shapes and from what the machine has free right now."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparkquant.decisions import Decision, Plan
from sparkquant.errors import UsageError
from sparkquant.layers import LayerClass
from sparkquant.passes import ends_a_module, stage_of

CPU_BATCH, DEVICE_BATCH = 2048, 16384
"""Positions that run together: few on a CPU, where a small batch stays near the caches."""

STATES_PER_POSITION = 12
"""Hidden-sized and intermediate-sized tensors that a block holds for a batch, roughly."""

MATRIX_COPIES = 8
"""float32 copies of one matrix while it is solved: target, codes, gradient, candidates."""

BASE_BYTES = 128 * 2**20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the largest block (twice with a second stream), of the statistics of a stage, of solving the largest
    matrix, of a batch, and of rows on disk.

    spill  the statistics go to mapped files of the work folder because memory is short
    """

    block_bytes: int
    statistics_bytes: int
    solving_bytes: int
    batch_bytes: int
    rows_bytes: int
    available_bytes: int
    spill: bool

    @property
    def needed_bytes(self) -> int:
        """Memory needed above the imports."""
        kept = 0 if self.spill else self.statistics_bytes
        return self.block_bytes + kept + self.solving_bytes + self.batch_bytes + BASE_BYTES

    @property
    def message(self) -> str:
        """One line for a person."""
        where = "statistics in mapped files" if self.spill else "statistics in memory"
        return (
            f"calibration needs {_mib(self.needed_bytes)} ({where}) of {_mib(self.available_bytes)} available,"
            f" and {_mib(self.rows_bytes)} of disk for rows"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def batch_tokens(device: str) -> int:
    """Positions of a batch."""
    return CPU_BATCH if device.startswith("cpu") else DEVICE_BATCH


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def memory_plan(
    plan: Plan, lengths: Sequence[int], dtype: torch.dtype, *, device: str = "cpu", limit: int | None = None
) -> MemoryPlan:
    """Count, and refuse with numbers when even spilled statistics leave too little. `limit` replaces what is free."""
    available = limit if limit is not None else available_bytes(device)
    layers: dict[int | None, list[Decision]] = defaultdict(list)
    for decision in plan.decisions.values():
        if decision.layer_class not in (LayerClass.MTP, LayerClass.VISION, LayerClass.AUDIO):
            layers[decision.layer].append(decision)
    blocks = [decisions for layer, decisions in layers.items() if layer is not None]
    width = _hidden(plan)
    method = plan.recipe.method
    streams = 2 if method.name == "gptq" and method.correction > 0 else 1
    counted = {
        "block_bytes": streams * max((_block_bytes(block, dtype) for block in blocks), default=0),
        "statistics_bytes": streams
        * max((_statistics_bytes(block, method.name) for block in layers.values()), default=0),
        "solving_bytes": max((_solving_bytes(d, method.name) for d in plan.decisions.values() if d.scheme), default=0),
        "batch_bytes": batch_tokens(device) * STATES_PER_POSITION * width * dtype.itemsize,
        "rows_bytes": streams * sum(lengths) * dtype.itemsize * (2 * width + _kept_width(blocks, width, device)),
    }
    for spill in (False, True):
        made = MemoryPlan(**counted, available_bytes=available, spill=spill)
        if made.needed_bytes <= available:
            return made
    raise UsageError(
        f"calibration needs {_mib(made.needed_bytes)} even with statistics in files, {_mib(available)} are available",
        hint="free memory, raise --max-memory, or use a data-free method (--method mse)",
    )


def available_bytes(device: str) -> int:
    """Free memory now. A chip with unified memory reports the same pool twice, so the smaller number counts."""
    free = _mem_available()
    if device.startswith("cuda"):
        free = min(free, int(torch.cuda.mem_get_info(device)[0]))
    return free


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _hidden(plan: Plan) -> int:
    embedding = (d for d in plan.decisions.values() if d.layer_class is LayerClass.EMBED)
    return next((d.shape[-1] for d in embedding), 0)


def _block_bytes(decisions: Sequence[Decision], dtype: torch.dtype) -> int:
    return sum(d.parameters for d in decisions) * dtype.itemsize


def _kept_width(blocks: Sequence[Sequence[Decision]], width: int, device: str) -> int:
    """Numbers per position in the files in front of and behind modules, in the block that has most of them."""
    where = torch.device(device)
    ends = (
        [d.shape[-1] for d in block if len(d.shape) == 2 and ends_a_module(d.layer_class, where)] for block in blocks
    )
    return max((sum(columns) + width * len(columns) for columns in ends), default=0)


def _statistics_bytes(decisions: Sequence[Decision], method: str) -> int:
    """float32 sums of every group of the largest stage; experts are solved one after the other."""
    columns: dict[int, dict[str, int]] = defaultdict(dict)
    for d in decisions:
        if d.scheme is not None:
            columns[stage_of(d.layer_class)][d.group] = d.shape[-1]
    return max(
        (sum(4 * k * (k if method == "gptq" else 1) for k in groups.values()) for groups in columns.values()), default=0
    )


def _solving_bytes(decision: Decision, method: str) -> int:
    """Factors of one Hessian (float64 on the way) if any, and float32 copies of the matrix band being solved."""
    columns = decision.shape[-1]
    band = min(math.prod(decision.shape[-2:]), 2**26)
    factors = 32 * columns * columns if method == "gptq" else 0
    return factors + MATRIX_COPIES * 4 * band
