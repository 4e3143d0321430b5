"""Stacks of experts, odd sizes, and input that is refused with the sizes in the message."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkquant import numerics
from tests.numerics.formats import FORMATS, FP8_BLOCK, FP8_CHANNEL, INT4, NVFP4, Format, raw, same_bytes, weights


@pytest.mark.parametrize("format", [format for format in FORMATS if format is not NVFP4], ids=str)
def test_experts_are_separate_matrices(format: Format) -> None:
    stack = torch.stack([weights(130, 256, seed) for seed in range(3)])
    importance = torch.stack([torch.arange(256.0), torch.ones(256), torch.arange(256.0).flip(0)])
    stored = format.quantize(stack, search=True, importance=importance)
    for expert in range(3):
        alone = format.quantize(stack[expert], search=True, importance=importance[expert])
        assert same_bytes(tuple(t if t is None else t[expert] for t in stored), alone)
        restored = format.dequantize(stored, stack)[expert]
        assert torch.equal(restored, format.dequantize(alone, stack[expert]))


def test_each_expert_has_its_global_scale() -> None:
    stack = torch.stack([weights(8, 256, seed) * (seed + 1) for seed in range(3)])
    divisors = [numerics.global_scale(float(one.abs().max())) for one in stack]
    stored = numerics.quantize_nvfp4(stack, global_scale=divisors, search=True)
    restored = numerics.dequantize_nvfp4(*stored, global_scale=divisors)
    for expert, divisor in enumerate(divisors):
        alone = numerics.quantize_nvfp4(stack[expert], global_scale=divisor, search=True)
        assert same_bytes((stored.packed[expert], stored.scale[expert]), alone)
        assert torch.equal(restored[expert], numerics.dequantize_nvfp4(*alone, global_scale=divisor))


def test_shapes_and_dtypes_on_disk() -> None:
    weight = weights(130, 256)
    packed, scale, zero_point = numerics.quantize_integer(weight, bits=4, group_size=32, symmetric=False, search=False)
    assert (packed.dtype, packed.shape) == (torch.int32, (130, 32))
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (130, 8))
    assert zero_point is not None
    assert (zero_point.dtype, zero_point.shape) == (torch.int32, (17, 8))
    values, channel = numerics.quantize_fp8_channel(weight, search=False)
    assert (values.dtype, channel.dtype, channel.shape) == (torch.float8_e4m3fn, torch.bfloat16, (130, 1))
    assert numerics.quantize_fp8_block(weight, search=False).scale.shape == (2, 2)
    fp4, block = numerics.quantize_nvfp4(weight, global_scale=1.0, search=False)
    assert (fp4.dtype, fp4.shape, block.dtype, block.shape) == (
        torch.uint8,
        (130, 128),
        torch.float8_e4m3fn,
        (130, 16),
    )


def test_one_group_with_a_zero_point() -> None:
    weight = weights(5, 100)
    stored = numerics.quantize_integer(weight, bits=4, group_size=-1, symmetric=False, search=True)
    restored = numerics.dequantize_integer(*stored, bits=4, columns=100)
    assert (restored - weight).abs().max() <= weight.abs().max() / 7
    for tensor in stored:
        assert raw(tensor).numel() == tensor.numel() * tensor.element_size()  # type: ignore[arg-type,union-attr]


def test_input_is_left_alone() -> None:
    weight = weights()
    before = weight.clone()
    for format in FORMATS:
        format.quantize(weight, search=True)
        assert torch.equal(weight, before)


def test_parameters_are_accepted() -> None:
    parameter = torch.nn.Parameter(weights())
    for format in FORMATS:
        assert same_bytes(format.quantize(parameter, search=True), format.quantize(weights(), search=True))


@pytest.mark.parametrize("format", [INT4, NVFP4, FP8_CHANNEL, FP8_BLOCK], ids=str)
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(128), r"shape \[N, K\] or \[E, N, K\], got \(128,\)"),
        (torch.zeros(1, 1, 1, 128), r"got \(1, 1, 1, 128\)"),
        (torch.zeros(2, 128, dtype=torch.float64), "got torch.float64"),
        (torch.zeros(2, 128, dtype=torch.int8), "got torch.int8"),
        (torch.zeros(128, 128).T[:, ::2], "contiguous"),
    ],
)
def test_weights_refused(format: Format, weight: torch.Tensor, message: str) -> None:
    quantize: Any = format.quantize
    if format is NVFP4:
        quantize = lambda *a, **k: numerics.quantize_nvfp4(*a, global_scale=1.0, **k)  # noqa: E731
    with pytest.raises(ValueError, match=message):
        quantize(weight, search=False)


def test_sizes_refused() -> None:
    with pytest.raises(ValueError, match="200 columns do not divide into groups of 128"):
        INT4.quantize(torch.zeros(2, 200), search=False)
    with pytest.raises(ValueError, match="200 columns do not divide into NVFP4 blocks of 16"):
        numerics.quantize_nvfp4(torch.zeros(2, 200), global_scale=1.0, search=False)
    with pytest.raises(ValueError, match="groups of 0"):
        numerics.quantize_integer(torch.zeros(2, 128), bits=4, group_size=0, symmetric=True, search=False)
    with pytest.raises(ValueError, match="4 or 8 bits, got 5"):
        numerics.quantize_integer(torch.zeros(2, 128), bits=5, group_size=128, symmetric=True, search=False)
    with pytest.raises(ValueError, match="at least one row"):
        numerics.quantize_fp8_block(torch.zeros(2, 128), block=0, search=False)


def test_importance_refused() -> None:
    weight = torch.zeros(2, 128)
    with pytest.raises(ValueError, match="without search"):
        INT4.quantize(weight, search=False, importance=torch.ones(128))
    with pytest.raises(ValueError, match=r"shape \[128\] or \[1, 128\], got \(64,\)"):
        INT4.quantize(weight, search=True, importance=torch.ones(64))
    with pytest.raises(ValueError, match="must be float32"):
        INT4.quantize(weight, search=True, importance=torch.ones(128, dtype=torch.float64))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-37])
def test_global_scale_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="not a usable NVFP4 global scale"):
        numerics.quantize_nvfp4(torch.zeros(2, 16), global_scale=scale, search=False)


def test_one_global_scale_per_expert() -> None:
    with pytest.raises(ValueError, match="2 matrices need as many global scales, got 3"):
        numerics.quantize_nvfp4(torch.zeros(2, 4, 16), global_scale=[1.0, 1.0, 1.0], search=False)
