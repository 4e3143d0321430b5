"""One pass over a tensor: its largest magnitude, and whether every element is finite."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from sparkquant.numerics import dispatch


class Absmax(NamedTuple):
    """What `absmax` found."""

    amax: float
    """largest magnitude, 0.0 for an empty tensor, infinite when an element is not finite"""
    non_finite: tuple[int, ...] | None
    """index of the first infinite or NaN element in row-major order, None when all are finite"""


def absmax(tensor: Tensor) -> Absmax:
    """Scan a contiguous bfloat16, float16 or float32 tensor of any shape once."""
    if tensor.dtype not in dispatch.FLOATS:
        raise ValueError(f"absmax takes bfloat16, float16 or float32, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"absmax takes a contiguous tensor, got strides {tensor.stride()}")
    flat = tensor.detach().view(-1)
    step = 4 * dispatch.chunk_elements(flat)
    starts = range(0, flat.numel(), step)
    scan = dispatch.engine(flat).scan
    amax = 0.0
    found = dispatch.run(lambda start: scan(flat[start : start + step]), starts, flat)
    for start, (most, index) in zip(starts, found, strict=True):
        if index is not None:
            return Absmax(math.inf, _unravel(start + index, tuple(tensor.shape)))
        amax = max(amax, most)
    return Absmax(amax, None)


class NonFinite(ValueError):
    """A weight holds NaN or infinity; `absmax` says where."""


def refuse_non_finite(chunk: Tensor) -> None:
    """Raise NonFinite for a contiguous chunk with such an element. Cheap where the chunk is about to be read anyway."""
    flat = chunk.view(-1)
    if dispatch.engine(flat).scan(flat)[1] is not None:
        raise NonFinite("an element is not finite")


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    position = []
    for size in reversed(shape):
        index, coordinate = divmod(index, size)
        position.append(coordinate)
    return tuple(reversed(position))
