"""NVFP4 weights: FP4 E2M1 codes, an E4M3 scale per 16 columns, one float32 global scale.

A weight is about code * scale / global_scale: the global scale is a divisor, as compressed-tensors
stores it. Stored block scales are at least 2**-6, because Marlin flushes smaller ones to zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparkquant.numerics import dispatch, pack
from sparkquant.numerics.limits import BFLOAT16_MAX, NVFP4_RANGE
from sparkquant.numerics.limits import NVFP4_GROUP as GROUP
from sparkquant.numerics.limits import global_scale as global_scale
from sparkquant.numerics.rounding import e2m1_value


class Nvfp4Weights(NamedTuple):
    """The tensors on disk of one NVFP4 weight, without its global scale."""

    packed: Tensor
    """uint8 [N, K / 2]"""
    scale: Tensor
    """float8_e4m3fn [N, K / 16]"""


def quantize_nvfp4(
    weight: Tensor,
    *,
    global_scale: float | Sequence[float],
    search: bool,
    importance: Tensor | None = None,
) -> Nvfp4Weights:
    """Quantize [N, K] or [E, N, K] (contiguous bfloat16, float16 or float32), K a multiple of 16.

    `global_scale` is one divisor, or one for each of the E matrices. Without `search` a block scale
    is amax / 6; with it the E4M3 neighbour with the least squared error, weighted per column by
    `importance` (float32 [K], or [E, K] for a 3-D weight).
    """
    matrices = dispatch.as_matrices(weight)
    experts, rows, columns = matrices.shape
    if columns % GROUP:
        raise ValueError(f"{columns} columns do not divide into NVFP4 blocks of {GROUP}")
    divisors = _divisors(global_scale, experts)
    weights = dispatch.as_importance(importance, matrices, search)
    packed = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(experts, rows, columns // GROUP, dtype=torch.float8_e4m3fn, device=weight.device)
    encode = dispatch.engine(weight).nvfp4

    def work(job: tuple[int, slice]) -> None:
        encode(
            matrices[job],
            packed[job],
            scale[job],
            global_scale=divisors[job[0]],
            search=search,
            importance=None if weights is None else weights[job[0]],
        )

    dispatch.run(work, dispatch.row_jobs(matrices), weight)
    shape = weight.shape[:-1]
    return Nvfp4Weights(packed.view(*shape, columns // 2), scale.view(*shape, columns // GROUP))


def dequantize_nvfp4(packed: Tensor, scale: Tensor, *, global_scale: float | Sequence[float]) -> Tensor:
    """The float32 weight [N, K] (or [E, N, K]) that the stored tensors stand for."""
    experts = packed.shape[0] if packed.ndim == 3 else 1
    divisor = torch.tensor(_divisors(global_scale, experts), device=packed.device)
    divisor = divisor.view(-1, 1, 1) if packed.ndim == 3 else divisor
    values = torch.unflatten(e2m1_value(pack.unpack_nibbles(packed)), -1, (-1, GROUP))
    return (values * (scale.float() / divisor).unsqueeze(-1)).flatten(-2)


def _divisors(global_scale: float | Sequence[float], experts: int) -> list[float]:
    given = [global_scale] * experts if isinstance(global_scale, int | float) else global_scale
    divisors = [float(divisor) for divisor in given]
    if len(divisors) != experts:
        raise ValueError(f"{experts} matrices need as many global scales, got {len(divisors)}")
    for divisor in divisors:
        if not (divisor > 0 and math.isfinite(divisor) and divisor * BFLOAT16_MAX >= NVFP4_RANGE):
            raise ValueError(f"{divisor} is not a usable NVFP4 global scale (448 * 6 / amax)")
    return divisors
