"""Zeros stay zero, finite input stays finite, and NVFP4 scales stay where Marlin keeps them."""

from __future__ import annotations

import math

import pytest
import torch

from sparkquant import numerics
from tests.numerics.formats import FORMATS, Format, adversarial, divisor, weights

SEARCH = pytest.mark.parametrize("search", [False, True], ids=["rtn", "mse"])
ADVERSARIAL = adversarial()


@SEARCH
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_finite_and_exact_zeros(format: Format, search: bool) -> None:
    for name, weight in ADVERSARIAL.items():
        stored = format.quantize(weight, search=search)
        restored = format.dequantize(stored, weight)
        assert restored.dtype is torch.float32, name
        assert restored.isfinite().all(), name
        assert restored.bfloat16().isfinite().all(), name
        for tensor in stored:
            if tensor is not None and tensor.is_floating_point():
                assert tensor.float().isfinite().all(), name
        empty = (format.group(weight) == 0).all(-1)
        assert not format.group(restored)[empty].any(), name


@SEARCH
def test_nvfp4_scales_are_normal_and_positive(search: bool) -> None:
    for name, weight in ADVERSARIAL.items():
        stored = numerics.quantize_nvfp4(weight, global_scale=divisor(weight), search=search)
        scale = stored.scale.float()
        assert scale.min() >= 2.0**-6, name
        assert scale.max() <= 448.0, name


@SEARCH
def test_a_faint_block_keeps_the_smallest_scale(search: bool) -> None:
    weight = torch.full((1, 32), 1.0)
    weight[0, 16:] = 1e-6
    stored = numerics.quantize_nvfp4(weight, global_scale=numerics.global_scale(1.0), search=search)
    assert stored.scale[0, 1].item() == 2.0**-6


@pytest.mark.parametrize("amax", [0.0, 5e-324, 2.0**-149, 1e-38, 1e-30, 1.0, 1e30, 3.3e38, 3.4028234663852886e38])
def test_global_scale_is_usable(amax: float) -> None:
    scale = numerics.global_scale(amax)
    assert scale == torch.tensor(scale).item(), "a float32 value"
    assert scale > 0
    assert math.isfinite(scale)
    assert 1 / torch.tensor(scale) >= torch.finfo(torch.float32).smallest_normal
    assert math.isfinite(torch.tensor(448 * 6) / torch.tensor(scale))


@pytest.mark.parametrize("amax", [-1.0, math.inf, math.nan])
def test_global_scale_refuses(amax: float) -> None:
    with pytest.raises(ValueError, match="amax must be finite"):
        numerics.global_scale(amax)


@SEARCH
def test_fp8_saturates_at_448(search: bool) -> None:
    # amax / 448 rounds down in bfloat16, so that amax / scale is above 448.
    weight = torch.full((1, 128), 449.2)
    stored = numerics.quantize_fp8_channel(weight, search=search)
    assert not stored.values.float().isnan().any()
    assert stored.values.float().abs().max() <= 448


def test_error_is_bounded_by_the_step() -> None:
    weight = weights().float()
    for format, step in zip(FORMATS, (7.5, 7.5, 7.5, 127.5, 127.5, 3.0, 16.0, 16.0), strict=True):
        restored = format.dequantize(format.quantize(weight, search=False), weight)
        far = format.group(weight).abs().amax(-1, keepdim=True)
        assert (format.group(restored - weight).abs() <= 1.03 * far / step).all(), format
