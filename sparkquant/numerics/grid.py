"""The values that a format can store, seen by a solver: steps per group and codes that multiply them.

A stored weight is code * step. Codes are whole numbers between bounds (integers less their zero point), or floats of
few bits (E2M1, E4M3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WHOLE = 1.5 * 2.0**23  # adding and subtracting it rounds to whole numbers, half to even


class Grid(NamedTuple):
    """Steps and bounds, float32 [N, G]; a group is `size` consecutive columns of a row, the last one may be shorter."""

    step: Tensor
    low: Tensor
    high: Tensor
    size: int
    least: float
    """smallest power of two of a float code, 0.0 for whole numbers"""
    anchor: float
    """2**(23 - mantissa bits): times the code's power of two, adding and subtracting it rounds"""

    def nearest(self, values: Tensor, group: int) -> Tensor:
        """Codes of one column that lies in `group`: float32 [N] -> float32 [N]."""
        clipped = (values / self.step[:, group]).clamp(self.low[:, group], self.high[:, group])
        if self.least == 0.0:
            return (clipped + WHOLE) - WHOLE
        power = (clipped.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=self.least)
        anchor = power * self.anchor
        return ((clipped.abs() + anchor) - anchor).copysign(clipped)

    def spread(self, columns: int) -> Tensor:
        """The step of every element: float32 [N, columns]."""
        return self.step.repeat_interleave(self.size, 1)[:, :columns]


def float_grid(step: Tensor, size: int, *, top: float, least: float, mantissa: int) -> Grid:
    """E2M1 is top 6, least 1, one mantissa bit; E4M3 is 448, 2**-6, three."""
    high = torch.full_like(step, top)
    return Grid(step, -high, high, size, least, 2.0 ** (23 - mantissa))
