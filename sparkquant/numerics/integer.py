"""Integer weights with group scales: int4 and int8, symmetric or with zero points.

A weight is about (code - zero_point) * scale. Scales are bfloat16 and the codes are made from the
rounded scale. Round to nearest takes the scale that compressed-tensors' min-max observer takes:
amax / 7.5 (127.5 for int8) when symmetric, (max - min) / 15 (255) with a zero point.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparkquant.numerics import dispatch, pack
from sparkquant.numerics.magnitude import refuse_non_finite


class IntegerWeights(NamedTuple):
    """The tensors on disk of one integer-quantized weight (a leading [E] when it was 3-D)."""

    packed: Tensor
    """int32 [N, ceil(K * bits / 32)]"""
    scale: Tensor
    """bfloat16 [N, K / group]; a symmetric scale that was searched may be negative"""
    zero_point: Tensor | None
    """int32 [ceil(N * bits / 32), K / group], or None when symmetric"""


def quantize_integer(
    weight: Tensor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    search: bool,
    importance: Tensor | None = None,
    check: bool = False,
) -> IntegerWeights:
    """Quantize [N, K] or [E, N, K] (contiguous bfloat16, float16 or float32).

    `group_size` consecutive columns share a scale; -1 means the whole row. With `search` the scale
    of each group minimizes the squared error, weighted per column by `importance` (float32 [K], or
    [E, K] for a 3-D weight). Raises ValueError when K is not a multiple of the group, and with
    `check` its subclass NonFinite when an element is not finite.
    """
    pack.check_bits(bits)
    matrices = dispatch.as_matrices(weight)
    experts, rows, columns = matrices.shape
    group = columns if group_size == -1 else group_size
    if group < 1 or columns % group:
        raise ValueError(f"{columns} columns do not divide into groups of {group_size}")
    weights = dispatch.as_importance(importance, matrices, search)
    device = weight.device
    packed_columns = pack.packed_columns(columns, bits)
    packed = torch.empty(experts, rows, packed_columns, dtype=torch.int32, device=device)
    scale = torch.empty(experts, rows, columns // group, dtype=torch.bfloat16, device=device)
    zero_point = None if symmetric else torch.empty_like(scale, dtype=torch.int8)
    encode = dispatch.engine(weight).integer

    def work(job: tuple[int, slice]) -> None:
        if check:
            refuse_non_finite(matrices[job])
        encode(
            matrices[job],
            packed[job],
            scale[job],
            None if zero_point is None else zero_point[job],
            bits=bits,
            search=search,
            importance=None if weights is None else weights[job[0]],
        )

    dispatch.run(work, dispatch.row_jobs(matrices), weight)
    shape = weight.shape[:-1]
    return IntegerWeights(
        packed.view(*shape, packed_columns),
        scale.view(*shape, columns // group),
        None if zero_point is None else pack.pack_zero_points(zero_point.view(*shape, columns // group), bits),
    )


def dequantize_integer(
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    bits: int,
    columns: int | None = None,
) -> Tensor:
    """The float32 weight [N, K] (or [E, N, K]) that the stored tensors stand for.

    `columns` is K; it may be omitted where the packed words are full.
    """
    columns = packed.shape[-1] * (32 // bits) if columns is None else columns
    groups = scale.shape[-1]
    if groups == 0 or columns % groups:
        raise ValueError(f"{columns} columns do not divide into {groups} groups")
    codes = torch.unflatten(pack.unpack_int32(packed, bits, columns).float(), -1, (groups, -1))
    if zero_point is not None:
        zeros = pack.unpack_zero_points(zero_point, bits, scale.shape[-2])
        codes -= zeros.unsqueeze(-1)
    return (codes * scale.float().unsqueeze(-1)).flatten(-2)
