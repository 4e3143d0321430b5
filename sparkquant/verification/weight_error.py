"""How far dequantized weights are from their source: the error of the module, of every row and of every scale group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sparkquant.checkpoint import Checkpoint, Computed
from sparkquant.errors import CheckpointError
from sparkquant.formats import dequantize
from sparkquant.formats.stored import StoredModule
from sparkquant.reading import TORCH_DTYPES, ShardReader
from sparkquant.schemes import FP8_BLOCK, NVFP4_BLOCK, Scheme
from sparkquant.verification.origins import Origin
from sparkquant.verification.payload import Payload

PIECE_ELEMENTS = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest relative error of a module, of one row and of one scale group, and distance of the gain from 1."""

    module: float
    gain: float
    row: float
    group: float


LIMITS: Mapping[str, Limits] = {
    "w4a16": Limits(0.25, 0.10, 0.35, 0.60),
    "nvfp4a16": Limits(0.25, 0.10, 0.25, 0.60),
    "w8a16": Limits(0.03, 0.02, 0.02, 0.05),
    "fp8": Limits(0.06, 0.03, 0.10, 0.10),
    "fp8_block": Limits(0.06, 0.03, 0.10, 0.10),
}
"""Rounding to nearest gives modules about 0.11, 0.10, 0.007 and 0.027, and its worst rows 0.18, 0.12 and 0.034 (FP8); a
calibrated method may trade up to twice that in the weights for less error in the outputs. A row or group of integers
may also be off by half a step everywhere, which is more than these where it holds an outlier."""

WHOLE_ROW = Limits(0.40, 0.20, 0.35, 0.60)
"""4-bit integers with one scale a row."""

LOST = 0.95
"""Rounding to nearest never loses a whole row or group: what is zeroed, doubled or turned has an error of 1 or 2."""

SCALED, ALIKE = 0.30, 0.90
"""A group is scaled wrongly when its gain is this far from 1 and its squared cosine with the source above that."""

QUIET = 0.1
"""Groups with less than this part of a row's mean power are judged as if they had it: errors of other groups of the row
may have been moved into them."""


def fault(checkpoint: Checkpoint, module: StoredModule, source: Checkpoint, origin: Origin) -> str:
    """What is wrong with a module's weights, "" when they are the source's within the scheme's error."""
    assert module.scheme is not None
    scheme = module.scheme.scheme
    rows, columns = origin.shape[0], math.prod(origin.shape[1:])
    if not rows * columns:
        return ""
    step = max(FP8_BLOCK, PIECE_ELEMENTS // max(1, columns) // FP8_BLOCK * FP8_BLOCK)
    error = power = product = 0.0
    worst = _Worst()
    with Payload(source) as original:
        for first in range(0, rows, step):
            last = min(rows, first + step)
            try:
                mine = dequantize(checkpoint, module, first=first, last=last)
                quantum = _quantum(checkpoint, module, mine)
            except CheckpointError as problem:
                return problem.what
            computed = source.computed.get(origin.header.name)
            theirs = _rows(original, origin, first, last, columns) if computed is None else computed.load(first, last)
            power += float(torch.linalg.vector_norm(theirs)) ** 2
            product += float(torch.dot(mine.flatten(), theirs.flatten()))
            _judge_rows(module, mine, theirs, quantum, first, worst)
            error += float(torch.linalg.vector_norm(mine.sub_(theirs))) ** 2
    if 0 < worst.rows < rows and math.isfinite(error):
        return worst.text(scheme)
    return _judged(scheme, error, power, product) or worst.text(scheme)


@dataclass
class _Worst:
    """The worst of the rows that are off, and how many they are."""

    ratio: float = 0.0
    where: str = ""
    rows: int = 0

    def text(self, scheme: Scheme) -> str:
        if not self.rows:
            return ""
        several = f" ({self.rows:,} rows are off)" if self.rows > 1 else ""
        what = f"relative error {self.ratio:.3f}" if math.isfinite(self.ratio) else "the source is zero there"
        return f"{self.where}: {what}, {scheme.label} stays below that{several}"


def _quantum(checkpoint: Checkpoint, module: StoredModule, mine: torch.Tensor) -> float:
    """What may be lost of every weight because its scale also serves much larger ones; 0 where a row has its own."""
    assert module.scheme is not None
    smallest = 2.0**-9  # of E4M3
    if module.scheme.scheme.name == "fp8_block":
        return float(mine.abs().max()) / 448 * smallest
    suffix = "weight_scale" if module.scheme.per_tensor else "weight_global_scale"
    suffix = "weight_scale_2" if "weight_scale_2" in module.tensors else suffix
    if not module.scheme.per_tensor and module.scheme.scheme.name != "nvfp4a16":
        return 0.0
    with ShardReader(checkpoint) as reader:
        value = abs(float(reader.read(module.tensors[suffix].name).reshape(-1)[0]))
    if module.scheme.per_tensor:
        return value * smallest
    return 6 * smallest * (value if suffix == "weight_scale_2" else 1 / value if value else math.inf)


def _judge_rows(
    module: StoredModule, mine: torch.Tensor, theirs: torch.Tensor, quantum: float, first: int, worst: _Worst
) -> None:
    assert module.scheme is not None
    scheme = module.scheme.scheme
    limits, (rows, columns) = _limits(scheme), theirs.shape
    width = {"fp8_block": FP8_BLOCK, "nvfp4a16": NVFP4_BLOCK}.get(scheme.name, scheme.group_size)
    if width <= 0 or columns % width or "g_idx" in module.tensors:
        width = columns
    shape = (rows, columns // width, width)
    power = theirs.square().view(shape).sum(-1)
    product = (mine * theirs).view(shape).sum(-1)
    error = (mine - theirs).square().view(shape).sum(-1)
    grid = torch.zeros_like(power)
    if scheme.is_integer:
        grid = width * (theirs.view(shape).abs().amax(-1) / (2**scheme.bits - 1)).square()
    of_row, row_error = power.sum(1), error.sum(1)
    off = row_error > _allowed(of_row, limits.row, grid.sum(1)) + columns * quantum**2
    if bool(off.any()):
        ratio = (row_error / of_row).sqrt().masked_fill(~off, -1)
        _note(worst, ratio, lambda at: f"row {first + at}")
    if shape[1] > 1:
        judged = torch.maximum(power, QUIET / shape[1] * of_row[:, None])
        lost = error > _allowed(judged, limits.group, grid) + width * quantum**2
        size = error - power + 2 * product  # of what is stored
        scaled = (product.square() > ALIKE * power * size) & ((product - power).abs() > SCALED * power)
        lost |= scaled & (power == judged) & (power > width * (8 * quantum) ** 2)
        lost &= ~off[:, None]
        if bool(lost.any()):
            ratio, group = (error / judged).sqrt().masked_fill(~lost, -1).max(1)
            _note(worst, ratio, lambda at: f"row {first + at}, {_inputs(int(group[at]), width)}")


def _inputs(group: int, width: int) -> str:
    return f"inputs {group * width} to {(group + 1) * width - 1}"


def _note(worst: _Worst, ratio: torch.Tensor, where: Callable[[int], str]) -> None:
    """Take over the rows whose ratio is not -1."""
    ratio = ratio.nan_to_num(nan=math.inf, posinf=math.inf)
    worst.rows += int((ratio >= 0).sum())
    at = int(ratio.argmax())
    if float(ratio[at]) > worst.ratio:
        worst.ratio, worst.where = float(ratio[at]), where(at)


def _allowed(power: torch.Tensor, limit: float, grid: torch.Tensor) -> torch.Tensor:
    return torch.minimum(LOST**2 * power, limit**2 * power + grid)


def _limits(scheme: Scheme) -> Limits:
    return WHOLE_ROW if scheme.bits == 4 and scheme.group_size == -1 else LIMITS[scheme.name]


def bfloat16_bytes(computed: Computed) -> bytes:
    """What a quantized source stands for, as it is written where it is kept."""
    weight: torch.Tensor = computed.load(0, None).to(torch.bfloat16).contiguous()
    return weight.reshape(-1).view(torch.uint8).numpy().tobytes()


def _rows(original: Payload, origin: Origin, first: int, last: int, columns: int) -> torch.Tensor:
    width = origin.bytes // max(1, origin.shape[0])
    data = original.raw(origin.header.shard, origin.start + first * width, (last - first) * width)
    flat = torch.frombuffer(bytearray(data), dtype=TORCH_DTYPES[origin.header.dtype])
    return flat.float().reshape(last - first, columns)


def _judged(scheme: Scheme, error: float, power: float, product: float) -> str:
    if not math.isfinite(error):
        return "the dequantized weights are not finite"
    if power == 0:
        return "the source is zero, the result is not" if error else ""
    limit, span = _limits(scheme).module, _limits(scheme).gain
    relative, gain = math.sqrt(error / power), product / power
    if relative > limit:
        return f"relative error {relative:.3f}, {scheme.label} stays below {limit} (gain {gain:.3f})"
    if abs(gain - 1) > span:
        return f"the weights are {gain:.3f} times the source: a scale is off"
    return ""
