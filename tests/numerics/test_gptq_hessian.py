"""Second moments of calibration inputs, and their factors in good and bad condition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparkquant import numerics
from sparkquant.numerics import gptq
from sparkquant.numerics.hessian import Energy, Factors, Hessian, factorize
from tests.numerics.test_gptq import COLUMNS, inputs, output_error, weight


def solve(w: Tensor, factors: Factors) -> Tensor:
    return gptq.gptq_integer(w, factors, bits=4, group_size=128, symmetric=True).weight


def factors_of(hessian: Hessian, **options: float) -> Factors:
    factors = factorize(hessian, **options)
    assert factors is not None
    return factors


def test_parts_add_up() -> None:
    x, y = inputs(100), inputs(100, seed=2)
    hessian = Hessian(COLUMNS)
    for rows in (slice(0, 30), slice(30, 30), slice(30, 100)):
        hessian.add(x[rows], y[rows])
    assert hessian.tokens == 100
    assert hessian.cross is not None
    for sums, expected in ((hessian.moment, x.T @ x), (hessian.cross, y.T @ x)):
        assert sums.dtype is torch.float32
        assert torch.allclose(sums, expected, rtol=1e-4, atol=1e-2)
    assert torch.allclose(hessian.importance, (x * x).mean(0), rtol=1e-4)


def test_wide_inputs_give_the_whole_symmetric_sum() -> None:
    x = inputs(60, columns=600)
    hessian = Hessian(600)
    hessian.add(x)
    assert torch.equal(hessian.moment, hessian.moment.T)
    assert torch.allclose(hessian.moment, x.T @ x, rtol=1e-4, atol=1e-3)


def test_half_precision_inputs_are_summed_in_float32() -> None:
    x = inputs(500).bfloat16()
    hessian = Hessian(COLUMNS)
    hessian.add(x)
    assert torch.allclose(hessian.moment, x.float().T @ x.float(), rtol=1e-4, atol=1e-2)


def test_shapes_and_pairs_are_checked() -> None:
    hessian = Hessian(4)
    with pytest.raises(ValueError, match=r"\[tokens, 4\]"):
        hessian.add(torch.ones(2, 5))
    with pytest.raises(ValueError, match="one shape"):
        hessian.add(torch.ones(2, 4), torch.ones(3, 4))
    hessian.add(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match="x_full comes with all tokens"):
        hessian.add(torch.ones(2, 4))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_inputs_are_reported(value: float) -> None:
    x = inputs(10)
    x[3, 7] = value
    hessian = Hessian(COLUMNS)
    hessian.add(x)
    with pytest.raises(ValueError, match="inputs of 10 calibration tokens"):
        factorize(hessian)
    hessian = Hessian(COLUMNS)
    hessian.add(inputs(10), x)
    with pytest.raises(ValueError, match="source inputs of 10 calibration tokens"):
        factorize(hessian)


def test_factor_is_that_of_the_inverse() -> None:
    hessian = Hessian(COLUMNS)
    hessian.add(inputs())
    factors = factors_of(hessian, damping=0.1)
    upper = factors.upper.double()
    assert torch.equal(upper, upper.triu())
    product = upper.T @ upper @ factors.damped[factors.order][:, factors.order].double()
    assert torch.allclose(product, torch.eye(COLUMNS, dtype=torch.float64), atol=1e-4)
    energies = factors.damped.diagonal()[factors.order]
    assert (energies[1:] <= energies[:-1]).all()


def test_damping_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        factorize(Hessian(4), damping=0.0)


def test_few_huge_inputs_do_not_damp_all_others_away() -> None:
    x = inputs()
    calm, loud = Hessian(COLUMNS), Hessian(COLUMNS)
    calm.add(x)
    x[:, 3] *= 1000
    loud.add(x)
    assert factors_of(loud).damping < 10 * factors_of(calm).damping


def test_unused_columns_are_rounded_to_nearest() -> None:
    x, w = inputs(), weight()
    x[:, ::5] = 0.0
    hessian = Hessian(COLUMNS)
    hessian.add(x)
    solved = gptq.gptq_integer(w, factors_of(hessian), bits=4, group_size=128, symmetric=True)
    scale = solved.tensors.scale.float().repeat_interleave(128, 1)
    rounded = (w.float() / scale).round().clamp(-8, 7) * scale
    assert torch.equal(solved.weight[:, ::5], rounded[:, ::5])


@pytest.mark.parametrize(
    "x",
    [
        inputs(5),
        inputs()[:, :1].expand(-1, COLUMNS),
        inputs() * torch.logspace(-15, 3, COLUMNS),
        inputs() * 1e-15,
        inputs() * 1e15,
    ],
    ids=["few tokens", "one direction", "all magnitudes", "tiny", "huge"],
)
@pytest.mark.parametrize("damping", [1e-6, 0.3])
def test_bad_condition(x: Tensor, damping: float) -> None:
    hessian = Hessian(COLUMNS)
    hessian.add(x)
    stored = solve(weight(), factors_of(hessian, damping=damping))
    assert torch.isfinite(stored).all()
    nearest = numerics.quantize_integer(weight(), bits=4, group_size=128, symmetric=True, search=False)
    before = output_error(numerics.dequantize_integer(*nearest, bits=4) - weight().float(), x).sum()
    assert output_error(stored - weight().float(), x).sum() < before


def test_damping_grows_until_the_factor_exists() -> None:
    hessian = Hessian(COLUMNS)
    hessian.add(inputs())
    hessian.lower[1, 0] = 3 * hessian.moment.diagonal().mean()
    factors = factors_of(hessian)
    assert factors.escalated > 0
    assert torch.isfinite(solve(weight(), factors)).all()
    hessian.lower[1, 0] = 1e9 * hessian.moment.diagonal().mean()
    assert factorize(hessian) is None


def test_target_moves_towards_the_source_outputs() -> None:
    y, w = inputs(1000), weight()
    x = y + 0.3 * inputs(1000, seed=9)
    plain, paired = Hessian(COLUMNS), Hessian(COLUMNS)
    plain.add(x)
    paired.add(x, y)
    wanted = y @ w.float().T
    errors = [((x @ solve(w, factors_of(h, damping=0.01)).T - wanted) ** 2).sum() for h in (plain, paired)]
    assert errors[1] < 0.9 * errors[0]
    full = factors_of(paired, damping=1e-6, correction=1.0).target(w)
    best = torch.linalg.lstsq(x.double(), wanted.double()).solution.T
    errors = [((x @ target.float().T - wanted) ** 2).sum() for target in (full, best)]
    assert errors[0] < 1.0001 * errors[1]
    assert torch.equal(factors_of(paired, correction=0.0).target(w), w.float())


def test_importance_weighs_the_scale_search() -> None:
    x, w = inputs(), weight()
    hessian = Hessian(COLUMNS)
    hessian.add(x)
    options = {"bits": 4, "group_size": 128, "symmetric": True, "search": True}
    results = [
        numerics.quantize_integer(w, **options, importance=importance)  # type: ignore[arg-type]
        for importance in (None, hessian.importance)
    ]
    errors = [
        float((hessian.importance * (numerics.dequantize_integer(*r, bits=4) - w.float()) ** 2).sum()) for r in results
    ]
    assert errors[1] < 0.95 * errors[0]


def test_energy_is_the_diagonal_of_the_hessian() -> None:
    hessian, energy = Hessian(24), Energy(24)
    for tokens in (7, 0, 130):
        x = torch.randn(tokens, 24, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        hessian.add(x)
        energy.add(x)
    assert energy.tokens == hessian.tokens == 137
    torch.testing.assert_close(energy.importance, hessian.importance)
    assert not Energy(3).importance.any()
    with pytest.raises(ValueError, match=r"inputs have shape \[tokens, 24\], got \(5, 23\)"):
        energy.add(torch.zeros(5, 23))
