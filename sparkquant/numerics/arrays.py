"""The formats through the compiled kernels, for a chunk of rows in numpy arrays. No torch.

A bfloat16 array is its bits as uint16, an E4M3 array its bits as uint8. Weights are such bits, or float32. ``compiled``
offers the same to tensors; ``reference`` and ``search`` are the twins in plain torch that give the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkquant.numerics import kernels_float, kernels_integer
from sparkquant.numerics.limits import (
    ASYMMETRIC_FACTORS,
    FP8_FACTORS,
    NVFP4_AWAY,
    REFITS,
    SYMMETRIC_FACTORS,
    asymmetric_limit,
    fp8_limit,
    symmetric_limit,
)

Array = np.ndarray[Any, Any]

# Raw bits of a type, the mask of its magnitude and the magnitude of infinity.
_BITS = {
    "BF16": (np.uint16, np.uint32(0x7FFF), np.uint32(0x7F80)),
    "F16": (np.uint16, np.uint32(0x7FFF), np.uint32(0x7C00)),
    "F32": (np.uint32, np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)),
}
FLOATS = tuple(_BITS)
"""Names of the source types that the kernels take."""

NO_IMPORTANCE = np.empty(0, np.float32)


def bits(raw: Any, dtype: str) -> Array:
    """A flat buffer of a source type as unsigned integers."""
    return np.frombuffer(raw, _BITS[dtype][0])


def value(code: Any, dtype: str) -> float:
    """The number that some bits stand for."""
    code = np.asarray(code)
    if dtype == "BF16":
        return float((code.astype(np.uint32) << np.uint32(16)).view(np.float32))
    return float(code.view(np.float16 if dtype == "F16" else np.float32))


def scan(codes: Array, dtype: str) -> tuple[float, int | None]:
    """Largest magnitude of flat bits, and the index of the first that is not finite."""
    width, mask, infinity = _BITS[dtype]
    most, index = kernels_float.scan(codes, mask, infinity)
    if index >= 0:
        return float("inf"), index
    return value(width(most), dtype), None


def first_not_finite(codes: Array, dtype: str) -> int | None:
    """The index of the first of flat bits that is NaN or infinite."""
    width, _, infinity = _BITS[dtype]
    bad = (codes & width(infinity)) == width(infinity)
    return int(bad.argmax()) if bad.any() else None


def position(flat: int, shape: tuple[int, ...]) -> list[int]:
    """The index of an element by its place in row-major order."""
    return [int(axis) for axis in np.unravel_index(flat, shape)]


def floats(codes: Array, dtype: str) -> Array:
    """What the kernels read: bfloat16 as bits, float32; float16 is widened."""
    if dtype == "BF16":
        return codes
    return codes.view(np.float16).astype(np.float32) if dtype == "F16" else codes.view(np.float32)


def integer(
    x: Array,
    packed: Array,
    scale: Array,
    zero_point: Array | None,
    *,
    bits: int,
    search: bool,
    importance: Array = NO_IMPORTANCE,
) -> bool:
    """Encode x [R, K] into packed uint8 [R, 4 * words], bfloat16 scale [R, G] and int8 zero points [R, G].

    Returns whether x is finite; where it is not, the outputs mean nothing.
    """
    floor, steps = np.float32(-(2 ** (bits - 1))), np.float32((2**bits - 1) / 2)
    if zero_point is None:
        limit = np.float32(symmetric_limit(bits))
        if not search:
            return _finite(x, kernels_integer.nearest_symmetric(x, scale, steps, limit, floor, packed))
        most = kernels_integer.minmax_symmetric(x, scale, steps, limit)
        factors = np.array(SYMMETRIC_FACTORS[bits], np.float32)
        kernels_integer.search_symmetric(x, importance, scale.ravel(), floor, limit, factors, REFITS[bits])
        zeros = np.zeros(scale.shape, np.int8)
    else:
        zeros = zero_point
        limit = np.float32(asymmetric_limit(bits))
        most = kernels_integer.minmax_asymmetric(x, scale, zeros, floor, steps, limit)
        if search:
            factors = np.array(ASYMMETRIC_FACTORS[bits], np.float32)
            kernels_integer.search_asymmetric(
                x, importance, scale.ravel(), zeros.ravel(), floor, steps, limit, factors, REFITS[bits]
            )
    kernels_integer.encode(x, scale, zeros, floor, packed)
    return _finite(x, most)


def nvfp4(
    x: Array, packed: Array, scale: Array, *, global_scale: float, search: bool, importance: Array = NO_IMPORTANCE
) -> None:
    """Encode x [R, K] into packed uint8 [R, K/2] and E4M3 scale [R, K/16]."""
    divisor = np.float32(global_scale)
    kernels_float.nvfp4_minmax(x, divisor, scale)
    if search:
        kernels_float.nvfp4_search(x, importance, divisor, scale.ravel(), *NVFP4_AWAY)
    kernels_float.nvfp4_encode(x, divisor, scale, packed)


def fp8(
    x: Array, values: Array, scale: Array, *, block: tuple[int, int], search: bool, importance: Array = NO_IMPORTANCE
) -> bool:
    """Encode x [R, K] into E4M3 values [R, K] and bfloat16 scale per block; returns as `integer`."""
    limit = np.float32(fp8_limit())
    if not search:
        return _finite(x, kernels_float.fp8_nearest(x, *block, limit, scale, values))
    most = kernels_float.fp8_minmax(x, *block, limit, scale)
    factors = np.array(FP8_FACTORS, np.float32)
    kernels_float.fp8_search(x, importance, *block, limit, factors, scale)
    kernels_float.fp8_encode(x, *block, scale, values)
    return _finite(x, most)


def _finite(x: Array, most: Any) -> bool:
    """Whether the largest magnitude is, given as bits of the type that the kernels have read."""
    return bool(most < _BITS["BF16" if x.itemsize == 2 else "F32"][2])


def pack_zero_points(zeros: Array, bits: int) -> Array:
    """Pack along the output rows, the first row lowest: int8 [R, G] -> int32 [R * bits / 32, G]."""
    per_word = 32 // bits
    unsigned = (zeros.astype(np.int32) + (1 << (bits - 1))).view(np.uint32)
    words = np.zeros((zeros.shape[0] // per_word, zeros.shape[1]), np.uint32)
    for index in range(per_word):
        words |= unsigned[index::per_word] << np.uint32(index * bits)
    return words.view(np.int32)
