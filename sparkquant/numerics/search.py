"""Method mse: the scale of least squared error, among a few, for every format.

The search in plain torch; its candidate grids are in ``limits``. The squared error
won over |e|**p for p = 1.5, 2.4 and 3 and over weighting by magnitude, measured as KL of a trained
model. A symmetric integer scale may be negative: the two's complement grid has one more code below
zero than above, and the largest element deserves it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkquant.numerics.limits import (
    ASYMMETRIC_FACTORS,
    BFLOAT16_EPS,
    E2M1_MAX,
    E4M3_MAX,
    FP8_FACTORS,
    NVFP4_AWAY,
    REFITS,
    SYMMETRIC_FACTORS,
)
from sparkquant.numerics.rounding import divide, e2m1_magnitude, to_bfloat16, to_e4m3

_LANES = 16
_TINY = 2.0**-120


def lane_sum(terms: Tensor, lanes: int = _LANES) -> Tensor:
    """Sum [..., n] over the last dimension in the order of the kernels' partial sums: [..., 1]."""
    pad = -terms.shape[-1] % lanes
    parts = torch.unflatten(torch.nn.functional.pad(terms, (0, pad)), -1, (-1, lanes)).unbind(-2)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    while lanes > 1:
        lanes //= 2
        total = total[..., :lanes] + total[..., lanes:]
    return total


def reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, or 0 where that overflows."""
    return torch.where(scale.abs() >= _TINY, torch.ones_like(scale) / scale, 0.0)


def weighted(importance: Tensor | None, terms: Tensor) -> Tensor:
    """importance * terms; no importance means ones."""
    return terms if importance is None else importance * terms


def symmetric_scale(groups: Tensor, importance: Tensor | None, start: Tensor, bits: int, limit: float) -> Tensor:
    """Improve min-max scales: groups [M, g], importance [M, g], start [M, 1] -> [M, 1] float32."""
    floor = -(2.0 ** (bits - 1))
    bounds = (torch.full_like(start, floor), torch.full_like(start, -floor - 1))
    best, least = start, integer_error(groups, importance, start, bounds)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    base = divide(torch.where(high > -low, high, low), floor)
    for factor in SYMMETRIC_FACTORS[bits]:
        trial = to_bfloat16((base * factor).clamp(-limit, limit))
        error = integer_error(groups, importance, trial, bounds)
        best, least = torch.where(error < least, trial, best), torch.where(error < least, error, least)
    return refit(groups, importance, best, least, bounds, bits, limit)


def asymmetric_scale(
    groups: Tensor, importance: Tensor | None, start: tuple[Tensor, Tensor], bits: int, limit: float
) -> tuple[Tensor, Tensor]:
    """Improve min-max scales and zero points, each [M, 1] float32."""
    best, best_zero = start
    least = integer_error(groups, importance, best, code_bounds(best_zero, bits))
    low, high = group_range(groups)
    step = divide(high * 0.5 - low * 0.5, (2**bits - 1) / 2)
    for factor in ASYMMETRIC_FACTORS[bits]:
        trial = nonzero_scale(step * factor, limit)
        zero = zero_points(low * factor, trial, bits)
        error = integer_error(groups, importance, trial, code_bounds(zero, bits))
        better = error < least
        best, best_zero = torch.where(better, trial, best), torch.where(better, zero, best_zero)
        least = torch.where(better, error, least)
    bounds = code_bounds(best_zero, bits)
    return refit(groups, importance, best, least, bounds, bits, limit), best_zero


def refit(
    groups: Tensor,
    importance: Tensor | None,
    best: Tensor,
    least: Tensor,
    bounds: tuple[Tensor, Tensor],
    bits: int,
    limit: float,
) -> Tensor:
    """Replace scales by the least-squares scale for their own codes where that is better."""
    for _ in range(REFITS[bits]):
        codes = (groups * reciprocal(best)).clamp(*bounds).round()
        ratio = lane_sum(weighted(importance, groups * codes)) / lane_sum(weighted(importance, codes * codes))
        usable = (ratio.abs() <= limit) & (ratio != 0)
        trial = torch.where(usable, to_bfloat16(ratio), best)
        error = integer_error(groups, importance, trial, bounds)
        best, least = torch.where(error < least, trial, best), torch.where(error < least, error, least)
    return best


def integer_error(groups: Tensor, importance: Tensor | None, scale: Tensor, bounds: tuple[Tensor, Tensor]) -> Tensor:
    """Weighted squared error [M, 1] of groups [M, g] with codes (less zero point) in bounds."""
    codes = (groups * reciprocal(scale)).clamp(*bounds).round()
    difference = groups - codes * scale
    return lane_sum(weighted(importance, difference * difference))


def code_bounds(zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest code less the zero point."""
    floor = -(2.0 ** (bits - 1))
    return floor - zero, (-floor - 1) - zero


def group_range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest element of each group, both including zero: [M, 1] each."""
    return groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)


def nonzero_scale(wanted: Tensor, limit: float) -> Tensor:
    """Round to bfloat16, at most `limit`; zero becomes what compressed-tensors stores for it.

    So does what is close to the denormal numbers, whose reciprocal overflows: such weights are rounded to zero.
    """
    scale = to_bfloat16(wanted.clamp(max=limit))
    return torch.where(scale >= _TINY, scale, BFLOAT16_EPS)


def zero_points(low: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The code that stands for zero when `low` is to get the lowest code."""
    floor = -(2.0 ** (bits - 1))
    return (floor - low / scale).clamp(floor, -floor - 1).round()


def nvfp4_codes(groups: Tensor, importance: Tensor | None, start: Tensor, divisor: Tensor) -> Tensor:
    """Improve min-max E4M3 codes: groups [M, 16], start [M, 1] uint8 -> [M, 1] uint8."""
    far = groups.abs()
    best, least = start, nvfp4_error(far, importance, start, divisor)
    first, last = NVFP4_AWAY
    for away in range(first, last + 1):
        if away:
            trial = (start.int() + away).clamp(8, 126).to(torch.uint8)
            error = nvfp4_error(far, importance, trial, divisor)
            better = error < least
            best, least = torch.where(better, trial, best), torch.where(better, error, least)
    return best


def nvfp4_error(far: Tensor, importance: Tensor | None, code: Tensor, divisor: Tensor) -> Tensor:
    """Weighted squared error [M, 1] of magnitudes [M, 16] with E4M3 scale codes [M, 1]."""
    step = code.view(torch.float8_e4m3fn).float() / divisor
    difference = far - e2m1_magnitude((far * reciprocal(step)).clamp(max=E2M1_MAX)) * step
    return lane_sum(weighted(importance, difference * difference))


def fp8_scale(blocks: Tensor, importance: Tensor | None, start: Tensor, limit: float, lanes: int) -> Tensor:
    """Improve min-max scales: blocks [M, n], start [M, 1] -> [M, 1] float32."""
    far = blocks.abs()
    best, least = start, fp8_error(far, importance, start, lanes)
    for factor in FP8_FACTORS:
        trial = to_bfloat16((start * factor).clamp(max=limit))
        error = fp8_error(far, importance, trial, lanes)
        best, least = torch.where(error < least, trial, best), torch.where(error < least, error, least)
    return best


def fp8_error(far: Tensor, importance: Tensor | None, scale: Tensor, lanes: int) -> Tensor:
    """Weighted squared error [M, 1] of magnitudes [M, n] with float32 scales [M, 1]."""
    rounded = to_e4m3((far * reciprocal(scale)).clamp(max=E4M3_MAX)).float()
    difference = far - rounded * scale
    return lane_sum(weighted(importance, difference * difference), lanes)
