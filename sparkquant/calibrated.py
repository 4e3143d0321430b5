"""Calibrated methods as a backend: run the blocks once over the rows, then hand out what was solved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkquant.backend_job import BackendJob
from sparkquant.backends import Unit
from sparkquant.backends.native import NativeBackend
from sparkquant.blockwise import Blockwise, Progress, finished_blocks, stored_tensors_of
from sparkquant.calibration.calibration_set import CalibrationSet
from sparkquant.calibration.private_folder import private_folder
from sparkquant.decisions import Plan
from sparkquant.device import compute_dtype, usable_device
from sparkquant.events import Said
from sparkquant.memory import MemoryPlan, memory_plan
from sparkquant.stream import StreamedModel
from sparkquant.weights import StoredWeights

MAPPED = 2
"""Finished blocks that are open at once."""


class PreparedBackend:
    """Stored tensors from a finished work folder; what no block holds (a draft head) is quantized without data.

    Few blocks are mapped at a time: a result may be larger than the memory that a process may map.
    """

    def __init__(self, folder: Path) -> None:
        self._fallback = NativeBackend("mse")
        self._where = {name: path for path in finished_blocks(folder) for name in stored_tensors_of(path)}
        self._block = lru_cache(maxsize=MAPPED)(stored_tensors_of)

    def reads(self, unit: Unit) -> bool:
        """Only what was not solved needs its weights again."""
        return not all(name in self._where for name in _names(unit))

    def quantize(self, unit: Unit, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.quantize`."""
        if self.reads(unit):
            yield from self._fallback.quantize(unit, weights)
        else:
            yield from ((name, self._block(self._where[name])[name]) for name in _names(unit))


def _names(unit: Unit) -> Iterator[str]:
    for decision in unit.decisions:
        if not decision.parts:
            yield from (tensor.name for tensor in decision.outputs)
            continue
        for expert in range(unit.first, unit.last):
            yield from (tensor.name.format(expert=expert) for tensor in decision.outputs)


@contextmanager
def calibrated_backend(
    job: BackendJob, calibration: CalibrationSet
) -> Iterator[tuple[PreparedBackend, dict[str, Any]]]:
    """Solve every block (or go on where an interrupted run stopped), and yield a backend and the publishable record.

    The work folder is private to the user, holds activations but no text, and is deleted when the block succeeds.
    """
    plan, source = job.plan, job.source
    device = usable_device(job.device)
    dtype = compute_dtype(device)
    memory = memory_plan(plan, [len(row) for row in calibration.rows], dtype, device=device, limit=job.max_memory)
    with private_folder(job.key, outside=job.target) as folder:
        job.listener(Said(memory.message))
        if not (folder / "done").exists():
            with StoredWeights(source.checkpoint, source.overlay) as weights:
                model = StreamedModel(source.checkpoint, weights, device=device, dtype=dtype)
                options: dict[str, Any] = {"listener": job.listener, "spill": memory.spill}
                Blockwise(plan, weights, model, calibration.rows, folder, **options).run()
            (folder / "done").touch()
        yield PreparedBackend(folder), _record(plan, calibration, Progress.load(folder), memory, device, dtype)


def _record(
    plan: Plan, calibration: CalibrationSet, progress: Progress, memory: MemoryPlan, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Digests, counts and errors: nothing of the text or the ids."""
    return {
        "method": plan.recipe.method.as_json(),
        "calibration": calibration.record(),
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "memory": memory.as_json(),
        "excluded_rows": progress.excluded,
        "blocks": [asdict(record) for record in progress.records],
    }
