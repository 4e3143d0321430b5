"""compressed-tensors, which vLLM's loader comes from, as the oracle of every format.

It rounds in the dtype of the weight; so does this project in float32. The oracle gets float32 weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from sparkquant import numerics
from sparkquant.numerics import pack
from tests.numerics.formats import raw, weights

WEIGHT = weights(200, 512)


def integer_args(bits: int, symmetric: bool) -> QuantizationArgs:
    return QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=128)


FP4_ARGS = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
)
FP8_ARGS = {
    "channel": QuantizationArgs(num_bits=8, type="float", strategy="channel"),
    "block": QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
}


def decompress(compressor: Any, args: QuantizationArgs, **stored: Tensor | None) -> Tensor:
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight: Tensor = compressor.decompress(stored, scheme)["weight"]
    return weight


def observed(groups: Tensor) -> tuple[Tensor, Tensor]:
    return groups.amin(-1), groups.amax(-1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_symmetric_rtn_scale_and_codes(bits: int, dtype: torch.dtype) -> None:
    args = integer_args(bits, symmetric=True)
    weight = WEIGHT.to(dtype)
    ours = numerics.quantize_integer(weight, bits=bits, group_size=128, symmetric=True, search=False)
    scale, _ = calculate_qparams(*observed(torch.unflatten(weight, -1, (-1, 128))), args)
    assert torch.equal(ours.scale, scale.bfloat16())
    codes = quantize(weight.float(), ours.scale.float(), None, args, dtype=torch.int8)
    assert torch.equal(ours.packed, pack.pack_int32(codes, bits))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("search", [False, True])
def test_asymmetric_codes(bits: int, search: bool) -> None:
    args = integer_args(bits, symmetric=False)
    ours = numerics.quantize_integer(WEIGHT, bits=bits, group_size=128, symmetric=False, search=search)
    assert ours.zero_point is not None
    zero = pack.unpack_zero_points(ours.zero_point, bits, len(WEIGHT))
    if not search:
        scale, expected = calculate_qparams(*observed(torch.unflatten(WEIGHT.float(), -1, (-1, 128))), args)
        assert torch.equal(ours.scale, scale.bfloat16())
        # compressed-tensors takes the zero point from the scale before it is rounded to bfloat16.
        assert int((zero.int() - expected.int()).abs().max()) <= 1
    codes = quantize(WEIGHT.float(), ours.scale.float(), zero, args, dtype=torch.int8)
    assert torch.equal(ours.packed, pack.pack_int32(codes, bits))


@pytest.mark.parametrize("bits", [4, 8])
def test_searched_codes_are_what_their_scale_gives(bits: int) -> None:
    ours = numerics.quantize_integer(WEIGHT, bits=bits, group_size=128, symmetric=True, search=True)
    assert (ours.scale < 0).any()
    codes = quantize(WEIGHT.float(), ours.scale.float(), None, integer_args(bits, symmetric=True), dtype=torch.int8)
    assert torch.equal(ours.packed, pack.pack_int32(codes, bits))


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_integer_decompression(bits: int, symmetric: bool, search: bool) -> None:
    stored = numerics.quantize_integer(WEIGHT, bits=bits, group_size=128, symmetric=symmetric, search=search)
    theirs = decompress(
        PackedQuantizationCompressor,
        integer_args(bits, symmetric),
        weight_packed=stored.packed,
        weight_scale=stored.scale,
        weight_zero_point=stored.zero_point,
        weight_shape=torch.tensor(WEIGHT.shape),
    )
    assert torch.equal(numerics.dequantize_integer(*stored, bits=bits).bfloat16(), theirs)


def test_nvfp4_global_scale() -> None:
    for amax in (1e-3, 0.37, 1.0, 448.0, 1e6):
        expected = generate_gparam(torch.tensor([-amax]), torch.tensor([amax / 2]))
        # compressed-tensors multiplies by a rounded reciprocal.
        assert numerics.global_scale(torch.tensor(amax).item()) == pytest.approx(expected.item(), rel=2.0**-22)


def test_nvfp4_rtn_scale_and_codes() -> None:
    weight = WEIGHT.float()
    divisor = numerics.global_scale(float(weight.abs().max()))
    ours = numerics.quantize_nvfp4(weight, global_scale=divisor, search=False)
    global_scale = torch.tensor([divisor])
    scale, _ = calculate_qparams(*observed(torch.unflatten(weight, -1, (-1, 16))), FP4_ARGS, global_scale)
    assert torch.equal(raw(ours.scale), raw(scale.to(torch.float8_e4m3fn)))
    codes = quantize(weight, ours.scale.float(), None, FP4_ARGS, global_scale=global_scale)
    assert torch.equal(ours.packed, pack_fp4_to_uint8(codes))


@pytest.mark.parametrize("search", [False, True])
def test_nvfp4_decompression(search: bool) -> None:
    divisor = numerics.global_scale(float(WEIGHT.abs().max()))
    stored = numerics.quantize_nvfp4(WEIGHT, global_scale=divisor, search=search)
    theirs = decompress(
        NVFP4PackedCompressor,
        FP4_ARGS,
        weight_packed=stored.packed,
        weight_scale=stored.scale,
        weight_global_scale=torch.tensor([divisor]),
    )
    assert torch.equal(numerics.dequantize_nvfp4(*stored, global_scale=divisor).bfloat16(), theirs)


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("strategy", ["channel", "block"])
def test_fp8(strategy: str, search: bool) -> None:
    # compressed-tensors reads back whole blocks only.
    weight = WEIGHT if strategy == "channel" else weights(256, 384)
    args = FP8_ARGS[strategy]
    if strategy == "channel":
        stored = numerics.quantize_fp8_channel(weight, search=search)
        ours = numerics.dequantize_fp8_channel(*stored)
        groups = weight.unsqueeze(1)
    else:
        stored = numerics.quantize_fp8_block(weight, search=search)
        ours = numerics.dequantize_fp8_block(*stored)
        groups = weight.view(2, 128, 3, 128).transpose(1, 2).flatten(2)
    if not search:
        scale, _ = calculate_qparams(*observed(groups), args)
        assert torch.equal(stored.scale, scale)
    values = quantize(weight.float(), stored.scale.float(), None, args, dtype=torch.float8_e4m3fn)
    assert torch.equal(raw(stored.values), raw(values))
    theirs = decompress(NaiveQuantizationCompressor, args, weight=stored.values, weight_scale=stored.scale)
    assert torch.equal(ours.bfloat16(), theirs)


def test_fp8_edge_blocks() -> None:
    weight = weights(130, 200)
    stored = numerics.quantize_fp8_block(weight, search=False)
    values = NaiveQuantizationCompressor.compress(
        {"weight": weight.float(), "weight_scale": stored.scale.float()},
        QuantizationScheme(targets=["Linear"], weights=FP8_ARGS["block"]),
    )["weight"]
    assert stored.scale.shape == (2, 2)
    assert torch.equal(raw(stored.values), raw(values))
