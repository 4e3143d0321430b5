"""FP8 E4M3 weights with bfloat16 scales: one a row, or one per 128 x 128 block.

A weight is about value * scale. Round to nearest takes amax / 448 and saturates at 448: a bare
cast of a larger value would store NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparkquant.numerics import dispatch
from sparkquant.numerics.magnitude import refuse_non_finite


class Fp8Weights(NamedTuple):
    """The tensors on disk of one FP8 weight (a leading [E] when it was 3-D)."""

    values: Tensor
    """float8_e4m3fn [N, K]"""
    scale: Tensor
    """bfloat16 [N, 1] for channels, [ceil(N / block), ceil(K / block)] for blocks"""


def quantize_fp8_channel(
    weight: Tensor, *, search: bool, importance: Tensor | None = None, check: bool = False
) -> Fp8Weights:
    """Quantize [N, K] or [E, N, K] (contiguous bfloat16, float16 or float32), a scale a row.

    With `search` the scale has the least squared error among a few, weighted per column by
    `importance` (float32 [K], or [E, K] for a 3-D weight). With `check` an element that is not
    finite raises NonFinite.
    """
    return _quantize(weight, 1, weight.shape[-1], search, importance, check)


def quantize_fp8_block(
    weight: Tensor, *, block: int = 128, search: bool, importance: Tensor | None = None, check: bool = False
) -> Fp8Weights:
    """Quantize as `quantize_fp8_channel`, a scale per `block` x `block`; edge blocks are smaller."""
    if block < 1:
        raise ValueError(f"a block has at least one row and column, got {block}")
    return _quantize(weight, block, block, search, importance, check)


def dequantize_fp8_channel(values: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn [N, K] and bfloat16 [N, 1] (or [E, N, *]) to the float32 weight."""
    return values.float() * scale.float()


def dequantize_fp8_block(values: Tensor, scale: Tensor, *, block: int = 128) -> Tensor:
    """float8_e4m3fn [N, K] and bfloat16 block scales (or [E, *, *]) to the float32 weight."""
    rows, columns = values.shape[-2:]
    spread = scale.float().repeat_interleave(block, -2)[..., :rows, :]
    return values.float() * spread.repeat_interleave(block, -1)[..., :columns]


def _quantize(
    weight: Tensor, block_rows: int, block_columns: int, search: bool, importance: Tensor | None, check: bool
) -> Fp8Weights:
    matrices = dispatch.as_matrices(weight)
    experts, rows, columns = matrices.shape
    if columns == 0:
        raise ValueError(f"a weight needs columns, got shape {tuple(weight.shape)}")
    weights = dispatch.as_importance(importance, matrices, search)
    grid = (-(-rows // block_rows), -(-columns // block_columns))
    values = torch.empty(matrices.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(experts, *grid, dtype=torch.bfloat16, device=weight.device)
    encode = dispatch.engine(weight).fp8

    def work(job: tuple[int, slice]) -> None:
        matrix, span = job
        if check:
            refuse_non_finite(matrices[job])
        encode(
            matrices[job],
            values[job],
            scale[matrix, span.start // block_rows : -(-span.stop // block_rows)],
            block=(block_rows, block_columns),
            search=search,
            importance=None if weights is None else weights[matrix],
        )

    dispatch.run(work, dispatch.row_jobs(matrices, multiple=block_rows), weight)
    return Fp8Weights(values.view(weight.shape), scale.view(*weight.shape[:-2], *grid))
