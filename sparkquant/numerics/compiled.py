"""The formats through the compiled kernels, for a chunk of rows on the CPU.

The same functions as ``reference``: tensors in, numpy views to the kernels, bytes into the outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkquant.numerics import kernels_float, kernels_integer
from sparkquant.numerics.reference import asymmetric_limit, fp8_limit, symmetric_limit
from sparkquant.numerics.search import (
    ASYMMETRIC_FACTORS,
    FP8_FACTORS,
    NVFP4_AWAY,
    REFITS,
    SYMMETRIC_FACTORS,
)

_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
_NO_IMPORTANCE = np.empty(0, np.float32)


def scan(values: Tensor) -> tuple[float, int | None]:
    """Largest magnitude of a flat tensor and the index of its first non-finite element."""
    wide = values.dtype is torch.float32
    bits = values.view(torch.int32 if wide else torch.int16).numpy()
    mask = np.uint32(0x7FFFFFFF if wide else 0x7FFF)
    infinity = np.uint32(_INFINITY[values.dtype])
    most, index = kernels_float.scan(bits.view(np.uint32 if wide else np.uint16), mask, infinity)
    if index >= 0:
        return float("inf"), index
    integer_type = torch.int32 if wide else torch.int16
    return float(torch.tensor(most, dtype=integer_type).view(values.dtype)), None


def integer(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    bits: int,
    search: bool,
    importance: Tensor | None,
) -> None:
    """Encode x [R, K] into int32 packed, bfloat16 scale [R, G] and int8 zero points [R, G]."""
    values, scales = _floats(x), _bits(scale)
    floor, steps = np.float32(-(2 ** (bits - 1))), np.float32((2**bits - 1) / 2)
    weights = _weights(importance)
    if zero_point is None:
        zeros = np.zeros(scales.shape, np.int8)
        limit = np.float32(symmetric_limit(bits))
        kernels_integer.minmax_symmetric(values, scales, steps, limit)
        if search:
            factors = np.array(SYMMETRIC_FACTORS[bits], np.float32)
            kernels_integer.search_symmetric(values, weights, scales.ravel(), floor, limit, factors, REFITS[bits])
    else:
        zeros = zero_point.numpy()
        limit = np.float32(asymmetric_limit(bits))
        kernels_integer.minmax_asymmetric(values, scales, zeros, floor, steps, limit)
        if search:
            factors = np.array(ASYMMETRIC_FACTORS[bits], np.float32)
            kernels_integer.search_asymmetric(
                values,
                weights,
                scales.ravel(),
                zeros.ravel(),
                floor,
                steps,
                limit,
                factors,
                REFITS[bits],
            )
    kernels_integer.encode(values, scales, zeros, floor, _bits(packed))


def nvfp4(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    *,
    global_scale: float,
    search: bool,
    importance: Tensor | None,
) -> None:
    """Encode x [R, K] into uint8 packed [R, K/2] and float8_e4m3fn scale [R, K/16]."""
    values, scales, divisor = _floats(x), _bits(scale), np.float32(global_scale)
    kernels_float.nvfp4_minmax(values, divisor, scales)
    if search:
        kernels_float.nvfp4_search(values, _weights(importance), divisor, scales.ravel(), *NVFP4_AWAY)
    kernels_float.nvfp4_encode(values, divisor, scales, packed.numpy())


def fp8(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    *,
    block: tuple[int, int],
    search: bool,
    importance: Tensor | None,
) -> None:
    """Encode x [R, K] into float8_e4m3fn values [R, K] and bfloat16 scale per block."""
    floats, scales, limit = _floats(x), _bits(scale), np.float32(fp8_limit())
    kernels_float.fp8_minmax(floats, *block, limit, scales)
    if search:
        factors = np.array(FP8_FACTORS, np.float32)
        kernels_float.fp8_search(floats, _weights(importance), *block, limit, factors, scales)
    kernels_float.fp8_encode(floats, *block, scales, _bits(values))


def _floats(x: Tensor) -> np.ndarray[Any, Any]:
    """float32, or bfloat16 as uint16; a chunk of float16 is widened."""
    if x.dtype is torch.bfloat16:
        return _bits(x)
    array: np.ndarray[Any, Any] = x.float().numpy()
    return array


def _bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A numpy view of the raw bytes: uint16 for bfloat16, uint8 for everything else."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.view(torch.uint8).numpy()


def _weights(importance: Tensor | None) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = _NO_IMPORTANCE if importance is None else importance.numpy()
    return array
