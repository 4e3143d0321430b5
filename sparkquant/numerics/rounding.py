"""Rounding to the stored float formats in plain torch, saturating and half to even.

Each function has a twin in ``kernels_float`` or ``kernels_tile`` that gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkquant.numerics.limits import E2M1_MAX, E4M3_MAX


def divide(numerator: Tensor, denominator: float) -> Tensor:
    """IEEE division by a constant; CUDA would multiply by the reciprocal of a Python number."""
    return torch.div(numerator, numerator.new_tensor(denominator))


def to_bfloat16(value: Tensor) -> Tensor:
    """Round float32 to bfloat16, kept in float32."""
    return value.to(torch.bfloat16).float()


def to_e4m3(value: Tensor) -> Tensor:
    """Round float32 to float8_e4m3fn; magnitudes above 448 saturate (a bare cast gives NaN)."""
    return value.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e2m1_magnitude(magnitude: Tensor) -> Tensor:
    """Round non-negative float32 to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6."""
    clipped = magnitude.clamp(max=E2M1_MAX)
    # One mantissa bit: the step is half of the power of two below, and 0.5 under 1.
    power = (clipped.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=1.0)
    anchor = power * 2.0**22
    return (clipped + anchor) - anchor


def e2m1_code(value: Tensor) -> Tensor:
    """Round float32 to FP4 codes (uint8 0..15): sign bit 8, then the index of the magnitude.

    Negative values that round to zero keep their sign; -0.0 itself does not (compressed-tensors).
    """
    magnitude = e2m1_magnitude(value.abs())
    index = torch.where(
        magnitude < 1.0,
        magnitude * 2.0,
        ((magnitude.view(torch.int32) >> 22) - 252).float(),
    )
    return index.to(torch.uint8) | (value < 0).to(torch.uint8) << 3


def e2m1_value(code: Tensor) -> Tensor:
    """FP4 codes (uint8 0..15) to float32."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    table = torch.tensor([*magnitudes, *(-m for m in magnitudes)], device=code.device)
    return table[code.int()]
