"""The formats in plain torch, for a chunk of rows: any device, no compiler, the same bytes.

Every function writes into its output tensors; ``compiled`` has the same functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkquant.numerics import pack
from sparkquant.numerics.limits import E2M1_MAX, E4M3_MAX, asymmetric_limit, fp8_limit, symmetric_limit
from sparkquant.numerics.rounding import divide, e2m1_code, to_e4m3
from sparkquant.numerics.search import (
    asymmetric_scale,
    fp8_scale,
    group_range,
    nonzero_scale,
    nvfp4_codes,
    symmetric_scale,
    zero_points,
)

_FP8_LANES = 128


def scan(values: Tensor) -> tuple[float, int | None]:
    """Largest magnitude of a flat tensor and the index of its first non-finite element."""
    most = float(values.abs().amax())
    if most < float("inf"):
        return most, None
    return most, int((~values.isfinite()).nonzero()[0])


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
    groups = torch.unflatten(x.float(), -1, (scale.shape[-1], -1)).flatten(0, 1)
    weights = _group_importance(importance, x, groups.shape[-1])
    choose = _symmetric if zero_point is None else _asymmetric
    divisor, zero = choose(groups, weights, bits, search)
    bottom = -(2 ** (bits - 1))
    codes = (groups / divisor + zero).clamp(bottom, -bottom - 1).round().to(torch.int8)
    packed.copy_(pack.pack_int32(codes.view(x.shape), bits))
    scale.copy_(divisor.view(scale.shape))
    if zero_point is not None:
        zero_point.copy_(zero.view(scale.shape))


def _symmetric(groups: Tensor, importance: Tensor | None, bits: int, improve: bool) -> tuple[Tensor, Tensor]:
    steps = (2**bits - 1) / 2
    limit = symmetric_limit(bits)
    scale = nonzero_scale(divide(groups.abs().amax(-1, keepdim=True), steps), limit)
    if improve:
        scale = symmetric_scale(groups, importance, scale, bits, limit)
    return scale, torch.zeros_like(scale)


def _asymmetric(groups: Tensor, importance: Tensor | None, bits: int, improve: bool) -> tuple[Tensor, Tensor]:
    low, high = group_range(groups)
    limit = asymmetric_limit(bits)
    # Halves: the full range of float32 would overflow.
    scale = nonzero_scale(divide(high * 0.5 - low * 0.5, (2**bits - 1) / 2), limit)
    zero = zero_points(low, scale, bits)
    if improve:
        return asymmetric_scale(groups, importance, (scale, zero), bits, limit)
    return scale, zero


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
    groups = torch.unflatten(x.float(), -1, (scale.shape[-1], -1)).flatten(0, 1)
    divisor = groups.new_tensor(global_scale)
    far = groups.abs().amax(-1, keepdim=True)
    wanted = (divisor * divide(far, E2M1_MAX)).clamp(2.0**-6, E4M3_MAX)
    codes = to_e4m3(torch.where(far > 0, wanted, 0.125)).view(torch.uint8)
    if search:
        weights = _group_importance(importance, x, groups.shape[-1])
        codes = nvfp4_codes(groups, weights, codes, divisor)
    step = codes.view(torch.float8_e4m3fn).float() / divisor
    packed.copy_(pack.pack_nibbles(e2m1_code(groups / step).view(x.shape)))
    scale.view(torch.uint8).copy_(codes.view(scale.shape))


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
    limit = fp8_limit()
    rows, columns = x.shape
    blocks = _blocks(x.float(), block)
    far = blocks.abs().amax(-1, keepdim=True)
    divisor = nonzero_scale(divide(far, E4M3_MAX), limit)
    if search:
        weights = None
        if importance is not None:
            weights = _blocks(importance.expand(rows, columns), block)
        divisor = fp8_scale(blocks, weights, divisor, limit, _FP8_LANES)
    divisor = divisor.view(scale.shape)
    scale.copy_(divisor)
    spread = divisor.repeat_interleave(block[0], 0)[:rows]
    spread = spread.repeat_interleave(block[1], 1)[:, :columns]
    values.copy_(to_e4m3(x.float() / spread))


def _blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Rows of one block each [blocks, height * width], zeros beyond the edges.

    The width is a multiple of the lanes, so that lane_sum adds column k to sum k mod lanes.
    """
    height, width = block
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % width, 0, -x.shape[0] % height))
    x = x.view(x.shape[0] // height, height, x.shape[1] // width, width).transpose(1, 2)
    x = torch.nn.functional.pad(x, (0, -width % _FP8_LANES))
    return x.flatten(2).flatten(0, 1)


def _group_importance(importance: Tensor | None, x: Tensor, size: int) -> Tensor | None:
    """[K] -> [R * G, size], the weights of each group's columns."""
    if importance is None:
        return None
    return torch.unflatten(importance.expand(x.shape), -1, (-1, size)).flatten(0, 1)
