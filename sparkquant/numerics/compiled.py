"""The formats through the compiled kernels, for a chunk of rows in CPU tensors.

The same functions as ``reference``: tensors in, numpy views to ``arrays``, bytes into the outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkquant.numerics import arrays
from sparkquant.numerics.arrays import Array

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def scan(values: Tensor) -> tuple[float, int | None]:
    """Largest magnitude of a flat tensor and the index of its first non-finite element."""
    return arrays.scan(_codes(values), _NAMES[values.dtype])


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
    zeros = None if zero_point is None else zero_point.numpy()
    weights = _weights(importance)
    arrays.integer(_floats(x), _bytes(packed), _codes(scale), zeros, bits=bits, search=search, importance=weights)


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
    weights = _weights(importance)
    arrays.nvfp4(
        _floats(x), packed.numpy(), _bytes(scale), global_scale=global_scale, search=search, importance=weights
    )


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
    weights = _weights(importance)
    arrays.fp8(_floats(x), _bytes(values), _codes(scale), block=block, search=search, importance=weights)


def _codes(x: Tensor) -> Array:
    """The raw bits of a float tensor."""
    if x.dtype is torch.float32:
        return x.view(torch.int32).numpy().view("u4")
    return x.view(torch.int16).numpy().view("u2")


def _floats(x: Tensor) -> Array:
    return arrays.floats(_codes(x), _NAMES[x.dtype])


def _bytes(tensor: Tensor) -> Array:
    array: Array = tensor.view(torch.uint8).numpy()
    return array


def _weights(importance: Tensor | None) -> Array:
    return arrays.NO_IMPORTANCE if importance is None else importance.numpy()
