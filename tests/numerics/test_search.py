"""The scale search: never worse than round to nearest for any group, clearly better over all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparkquant import numerics
from tests.numerics.formats import (
    FORMATS,
    FP8_BLOCK,
    FP8_CHANNEL,
    INT4,
    INT4_ZERO_POINT,
    INT8,
    INT8_ZERO_POINT,
    NVFP4,
    Format,
    same_bytes,
    weights,
)

# Least share of the squared error that the search removes on `weights(256, 1024)`.
GAIN = {INT4: 0.2, INT4_ZERO_POINT: 0.08, INT8: 0.04, NVFP4: 0.22, FP8_CHANNEL: 0.06, FP8_BLOCK: 0.02}
# Sums of a few hundred float32 squares, in another order.
ROUNDING = 1 + 1e-5


def group_errors(format: Format, weight: Tensor, importance: Tensor | None, search: bool) -> Tensor:
    options = {"search": search, "importance": importance if search else None}
    restored = format.dequantize(format.quantize(weight, **options), weight)
    squares = (restored.double() - weight.double()) ** 2
    if importance is not None:
        squares = squares * importance.double()
    return format.group(squares).sum(-1)


@pytest.mark.parametrize("important", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_never_worse_for_any_group(format: Format, important: bool) -> None:
    importance = (torch.arange(512) % 17).float() ** 2 if important else None
    for weight in (weights(), weights(64, 512, seed=1).float() * 37, torch.full((3, 512), 0.37)):
        nearest = group_errors(format, weight, importance, search=False)
        searched = group_errors(format, weight, importance, search=True)
        assert (searched <= nearest * ROUNDING).all()


@pytest.mark.parametrize("format", GAIN, ids=str)
def test_gain(format: Format) -> None:
    weight = weights(256, 1024)
    nearest = group_errors(format, weight, None, search=False).sum()
    searched = group_errors(format, weight, None, search=True).sum()
    assert searched < (1 - GAIN[format]) * nearest


def test_int8_with_zero_points_has_little_to_gain() -> None:
    weight = weights(256, 1024)
    nearest = group_errors(INT8_ZERO_POINT, weight, None, search=False)
    assert group_errors(INT8_ZERO_POINT, weight, None, search=True).sum() < nearest.sum()


@pytest.mark.parametrize("format", [INT4, INT4_ZERO_POINT, NVFP4, FP8_CHANNEL], ids=str)
def test_importance_moves_error_to_other_columns(format: Format) -> None:
    weight = weights(256, 1024)
    importance = torch.ones(1024)
    importance[::8] = 50.0
    weighted = format.dequantize(format.quantize(weight, search=True, importance=importance), weight)
    plain = format.dequantize(format.quantize(weight, search=True), weight)
    error = [(restored - weight.float())[:, ::8].square().sum() for restored in (weighted, plain)]
    assert error[0] < 0.97 * error[1]


def test_uniform_importance_changes_nothing() -> None:
    weight = weights()
    for format in FORMATS:
        plain = format.quantize(weight, search=True)
        weighted = format.quantize(weight, search=True, importance=torch.ones(512))
        assert same_bytes(plain, weighted)


def test_the_largest_element_takes_the_extra_code() -> None:
    weight = torch.linspace(-1, 1, 128).repeat(2, 1)
    weight[0, 0], weight[1, -1] = -3.0, 3.0
    stored = numerics.quantize_integer(weight, bits=4, group_size=128, symmetric=True, search=True)
    assert stored.scale[0] > 0 > stored.scale[1]
