"""Numbers that both engines must agree on: ranges of the stored types, scales that stay finite. No torch.

The candidate grids of the scale search are here as well: ``search`` and ``kernels_*`` walk the same ones.
"""

from __future__ import annotations

import math

import numpy as np

E2M1_MAX = 6.0
E4M3_MAX = 448.0
BFLOAT16_MAX = (2.0 - 2.0**-7) * 2.0**127
BFLOAT16_EPS = 2.0**-7

NVFP4_GROUP = 16
NVFP4_RANGE = E4M3_MAX * E2M1_MAX
_GLOBAL_MAX = 2.0**126  # its reciprocal, which engines use, is still a normal float32

# Integers: multiples of the scale that just covers the group, then least-squares refits.
SYMMETRIC_FACTORS = {4: (1.02, 0.98, 0.94, 0.9, 0.86, 0.82, 0.78, 0.74), 8: (1.0, 0.995, 0.99)}
ASYMMETRIC_FACTORS = {4: (0.97, 0.93, 0.89, 0.85, 0.81, 0.77), 8: (0.998, 0.995, 0.99)}
REFITS = {4: 2, 8: 1}
# NVFP4: E4M3 codes away from amax / 6; +5 is close to amax / 4, where the largest code is 4.
NVFP4_AWAY = (-2, 6)
# FP8: powers of 2**(1/8). A larger scale moves all mantissas; a factor of 2 would change nothing.
FP8_FACTORS = tuple(2.0 ** (eighth / 8) for eighth in range(1, 8))


def symmetric_limit(bits: int) -> float:
    """The largest scale whose lowest code still dequantizes to a finite bfloat16."""
    return BFLOAT16_MAX / float(1 << (bits - 1))


def asymmetric_limit(bits: int) -> float:
    """As `symmetric_limit`, for a code minus its zero point."""
    return BFLOAT16_MAX / float((1 << bits) - 1)


def fp8_limit() -> float:
    """A scale that times 448 is still a finite bfloat16: half of 2**120."""
    return 2.0**119


def global_scale(amax: float) -> float:
    """The float32 divisor 448 * 6 / amax of a tensor, or of tensors that an engine fuses.

    1.0 for an all-zero tensor. Denormal and huge amax give the nearest divisor whose reciprocal
    and whose largest dequantized value stay finite. Raises ValueError when amax is negative,
    infinite or NaN.
    """
    if not 0.0 <= amax < math.inf:
        raise ValueError(f"amax must be finite and not negative, got {amax}")
    if amax == 0.0:
        return 1.0
    divisor = np.float32(min(NVFP4_RANGE / amax, _GLOBAL_MAX))
    while float(divisor) * BFLOAT16_MAX < NVFP4_RANGE:
        divisor = np.nextafter(divisor, np.float32(np.inf))
    return float(divisor)
