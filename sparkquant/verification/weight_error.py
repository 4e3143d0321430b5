"""How far a dequantized weight is from its source: the relative error, and the gain that a wrong scale shows as."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from sparkquant.checkpoint import Checkpoint, Computed
from sparkquant.errors import CheckpointError
from sparkquant.formats import dequantize
from sparkquant.formats.stored import StoredModule
from sparkquant.reading import TORCH_DTYPES
from sparkquant.schemes import FP8_BLOCK, Scheme
from sparkquant.verification.origins import Origin
from sparkquant.verification.payload import Payload

PIECE_ELEMENTS = 4 * 2**20

LIMITS: Mapping[str, tuple[float, float]] = {
    "w4a16": (0.25, 0.10),
    "nvfp4a16": (0.25, 0.10),
    "w8a16": (0.03, 0.02),
    "fp8": (0.06, 0.03),
    "fp8_block": (0.06, 0.03),
}
"""Largest relative error and distance of the gain from 1. Rounding to nearest gives about 0.11, 0.10, 0.007 and 0.027;
a calibrated method may trade up to twice that in the weights for less error in the outputs."""

WHOLE_ROW = (0.40, 0.20)
"""4-bit integers with one scale a row."""


def fault(checkpoint: Checkpoint, module: StoredModule, source: Checkpoint, origin: Origin) -> str:
    """What is wrong with a module's weights, "" when they are the source's within the scheme's error."""
    assert module.scheme is not None
    scheme = module.scheme.scheme
    rows, columns = origin.shape[0], math.prod(origin.shape[1:])
    step = max(FP8_BLOCK, PIECE_ELEMENTS // max(1, columns) // FP8_BLOCK * FP8_BLOCK)
    error = power = product = 0.0
    with Payload(source) as original:
        for first in range(0, rows, step):
            last = min(rows, first + step)
            try:
                mine = dequantize(checkpoint, module, first=first, last=last)
            except CheckpointError as problem:
                return problem.what
            computed = source.computed.get(origin.header.name)
            theirs = _rows(original, origin, first, last, columns) if computed is None else computed.load(first, last)
            power += float(torch.linalg.vector_norm(theirs)) ** 2
            product += float(torch.dot(mine.flatten(), theirs.flatten()))
            error += float(torch.linalg.vector_norm(mine.sub_(theirs))) ** 2
    return _judged(scheme, error, power, product)


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
    limit, span = WHOLE_ROW if scheme.bits == 4 and scheme.group_size == -1 else LIMITS[scheme.name]
    relative, gain = math.sqrt(error / power), product / power
    if relative > limit:
        return f"relative error {relative:.3f}, {scheme.label} stays below {limit} (gain {gain:.3f})"
    if abs(gain - 1) > span:
        return f"the weights are {gain:.3f} times the source: a scale is off"
    return ""
