"""Calibrated quantization against its own objective: the squared output error on correlated inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparkquant import numerics
from sparkquant.numerics import gptq
from sparkquant.numerics.columns import descend, gradient, refit, round_columns
from sparkquant.numerics.gptq import Solved
from sparkquant.numerics.hessian import Factors, Hessian, factorize

ROWS, COLUMNS = 96, 256
DIVISOR = 16000.0

Solve = Callable[[Tensor, Factors | None], Solved]  # type: ignore[type-arg]
SOLVERS: dict[str, Solve] = {
    "int4-g32": lambda w, f: gptq.gptq_integer(w, f, bits=4, group_size=32, symmetric=True),
    "int4-g128": lambda w, f: gptq.gptq_integer(w, f, bits=4, group_size=128, symmetric=True),
    "int4-row": lambda w, f: gptq.gptq_integer(w, f, bits=4, group_size=-1, symmetric=True),
    "int4-g64-zero-point": lambda w, f: gptq.gptq_integer(w, f, bits=4, group_size=64, symmetric=False),
    "int8-g128": lambda w, f: gptq.gptq_integer(w, f, bits=8, group_size=128, symmetric=True),
    "int8-row-zero-point": lambda w, f: gptq.gptq_integer(w, f, bits=8, group_size=-1, symmetric=False),
    "nvfp4": lambda w, f: gptq.gptq_nvfp4(w, f, global_scale=DIVISOR),
    "fp8-channel": gptq.gptq_fp8_channel,
    "fp8-block": lambda w, f: gptq.gptq_fp8_block(w, f, block=64),
}
EVERY = pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)


def inputs(tokens: int = 2048, columns: int = COLUMNS, seed: int = 0) -> Tensor:
    """Neighbouring columns are correlated, and some are far larger than others, as behind a norm."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(tokens, columns + 3, generator=generator)
    mixed = sum(noise[:, i : i + columns] for i in range(4))
    assert isinstance(mixed, Tensor)
    return mixed * torch.exp(0.7 * torch.randn(columns, generator=generator))


def weight(rows: int = ROWS, columns: int = COLUMNS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 0.03).bfloat16()


def calibrated(x: Tensor, **options: float) -> Factors:
    hessian = Hessian(x.shape[1])
    hessian.add(x)
    factors = factorize(hessian, **options)
    assert factors is not None
    return factors


def output_error(difference: Tensor, x: Tensor) -> Tensor:
    """Squared error of every output, summed over tokens: float64 [N]."""
    return ((x.double() @ difference.double().T) ** 2).sum(0)


def decode(tensors: object, columns: int) -> Tensor:
    if isinstance(tensors, numerics.IntegerWeights):
        bits = tensors.packed.shape[1] * 32 // columns
        return numerics.dequantize_integer(*tensors, bits=bits, columns=columns)
    if isinstance(tensors, numerics.Nvfp4Weights):
        return numerics.dequantize_nvfp4(*tensors, global_scale=DIVISOR)
    assert isinstance(tensors, numerics.Fp8Weights)
    if tensors.scale.shape[1] == 1 and tensors.scale.shape[0] == tensors.values.shape[0]:
        return numerics.dequantize_fp8_channel(*tensors)
    return numerics.dequantize_fp8_block(*tensors, block=64)


NEAREST: dict[str, Callable[[Tensor], object]] = {
    "int4-g32": lambda w: integer(w, bits=4, group_size=32),
    "int4-g128": lambda w: integer(w, bits=4, group_size=128),
    "int4-row": lambda w: integer(w, bits=4, group_size=-1),
    "int4-g64-zero-point": lambda w: integer(w, bits=4, group_size=64, symmetric=False),
    "int8-g128": lambda w: integer(w, bits=8, group_size=128),
    "int8-row-zero-point": lambda w: integer(w, bits=8, group_size=-1, symmetric=False),
    "nvfp4": lambda w: numerics.quantize_nvfp4(w, global_scale=DIVISOR, search=False),
    "fp8-channel": lambda w: numerics.quantize_fp8_channel(w, search=False),
    "fp8-block": lambda w: numerics.quantize_fp8_block(w, block=64, search=False),
}


def integer(w: Tensor, *, bits: int, group_size: int, symmetric: bool = True) -> numerics.IntegerWeights:
    return numerics.quantize_integer(w, bits=bits, group_size=group_size, symmetric=symmetric, search=False)


def name_of(solve: Solve) -> str:
    return next(name for name, other in SOLVERS.items() if other is solve)


def nearest(solve: Solve, w: Tensor) -> Tensor:
    """What round to nearest stores in the same format."""
    return decode(NEAREST[name_of(solve)](w), w.shape[1])


@EVERY
def test_beats_round_to_nearest(solve: Solve) -> None:
    x, w = inputs(), weight()
    solved = solve(w, calibrated(x))
    before, after = (output_error(q - w.float(), x).sum() for q in (nearest(solve, w), solved.weight))
    assert solved.method == "gptq"
    assert after < 0.6 * before


@EVERY
def test_reported_errors_are_true(solve: Solve) -> None:
    x, w = inputs(), weight()
    solved = solve(w, calibrated(x))
    whole = output_error(w.float(), x).sum()
    for reported, stored in ((solved.error, solved.weight), (solved.nearest_error, nearest(solve, w))):
        assert reported == pytest.approx(float(output_error(stored - w.float(), x).sum() / whole), rel=1e-3)


@EVERY
@pytest.mark.parametrize("shape", [(96, 256), (7, 128), (130, 192), (1, 64)])
def test_stores_what_it_believes(solve: Solve, shape: tuple[int, int]) -> None:
    if shape[1] % 128 and "g128" in name_of(solve):
        pytest.skip("not a multiple of the group")
    w = weight(*shape)
    solved = solve(w, calibrated(inputs(columns=shape[1])))
    plain = solve(w, None).tensors
    assert torch.equal(decode(solved.tensors, shape[1]), solved.weight)
    for stored, expected in zip(solved.tensors, plain, strict=True):
        assert (stored is None) == (expected is None)
        if stored is not None:
            assert (stored.shape, stored.dtype) == (expected.shape, expected.dtype)
            assert stored.is_contiguous()


@EVERY
@pytest.mark.parametrize("tokens", [1, 16, 4096])
def test_no_row_is_worse_than_round_to_nearest(solve: Solve, tokens: int) -> None:
    x, w = inputs(tokens, seed=3), weight(seed=4)
    w[5] = 0.0
    w[6, 17] = 3.0
    solved = solve(w, calibrated(x))
    before, after = (output_error(q - w.float(), x) for q in (nearest(solve, w), solved.weight))
    if solve is SOLVERS["fp8-block"]:
        before, after = (torch.stack([part.sum() for part in error.split(64)]) for error in (before, after))
    # Both errors are differences of float32 sums, taken through the second moments.
    noise = 1e-6 * output_error(w.float(), x).max()
    assert (after <= before * 1.001 + noise).all()


@EVERY
def test_same_input_same_bytes(solve: Solve) -> None:
    runs = [solve(weight(), calibrated(inputs())).tensors for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert first is second is None or torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@EVERY
def test_plain_torch_is_as_good(solve: Solve, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = calibrated(inputs())
    compiled = solve(weight(), factors)
    monkeypatch.setenv("SPARKQUANT_NUMBA", "0")
    plain = solve(weight(), factors)
    assert plain.error == pytest.approx(compiled.error, rel=0.02)
    assert (plain.weight != compiled.weight).float().mean() < 0.01


@EVERY
def test_no_tokens_means_scale_search(solve: Solve) -> None:
    assert factorize(Hessian(COLUMNS)) is None
    silent = Hessian(COLUMNS)
    silent.add(torch.zeros(10, COLUMNS))
    assert factorize(silent) is None
    solved = solve(weight(), None)
    assert solved.method == "search"
    assert torch.equal(decode(solved.tensors, COLUMNS), solved.weight)
    distance, bound = (((q - weight().float()) ** 2).sum() for q in (solved.weight, nearest(solve, weight())))
    assert distance <= bound


def test_near_the_best_of_all_codes() -> None:
    x, w = inputs(64, columns=8, seed=7)[:, :4], weight(12, 4, seed=8)
    factors = calibrated(x, damping=1e-4)
    solved = gptq.gptq_integer(w, factors, bits=4, group_size=-1, symmetric=True)
    codes = torch.tensor(list(itertools.product(range(-8, 8), repeat=4)), dtype=torch.float32)
    best = []
    for row, scale in zip(w.float(), solved.tensors.scale.float(), strict=True):
        best.append(((codes * scale - row) @ x.T).square().sum(1).min())
    after = output_error(solved.weight - w.float(), x).sum()
    assert after <= 1.15 * torch.stack(best).sum()


def test_descent_and_refit_only_improve() -> None:
    factors, w = calibrated(inputs()), weight().float()
    form = gptq._Integer(4, 32, True)
    _, grid = form.unpack(form.encode(w, search=True), COLUMNS)

    def objective() -> float:
        difference = codes * grid.spread(COLUMNS) - w
        return float(((difference @ factors.damped) * difference).sum())

    codes = round_columns(w, factors, grid)
    errors = [objective()]
    for _ in range(2):
        slope = gradient(codes, w, factors, grid)
        grid = refit(codes, slope, factors, grid, form.storable)
        errors.append(objective())
        descend(codes, slope, factors, grid, sweeps=1)
        errors.append(objective())
        assert torch.allclose(slope, gradient(codes, w, factors, grid), atol=1e-4 * float(slope.abs().max()) + 1e-3)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.95 * errors[0]


def test_group_scales_may_be_negative() -> None:
    solved = gptq.gptq_integer(weight(), calibrated(inputs()), bits=4, group_size=128, symmetric=True)
    share = (solved.tensors.scale < 0).float().mean()
    assert 0.2 < share < 0.8


def test_nvfp4_scales_stay_above_the_flush_limit() -> None:
    w = weight()
    w[:, 16:32] *= 1e-6
    solved = gptq.gptq_nvfp4(w, calibrated(inputs()), global_scale=DIVISOR)
    assert solved.tensors.scale.float().min() >= 2.0**-6


def test_row_order_does_not_matter() -> None:
    factors, w = calibrated(inputs()), weight()
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    straight = gptq.gptq_nvfp4(w, factors, global_scale=DIVISOR).weight
    shuffled = gptq.gptq_nvfp4(w[order].contiguous(), factors, global_scale=DIVISOR).weight
    assert (straight[order] != shuffled).float().mean() < 0.01


def test_column_order_does_not_matter_within_rows_of_one_scale() -> None:
    x, w = inputs(), weight()
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(0))
    straight = gptq.gptq_fp8_channel(w, calibrated(x)).weight
    shuffled = gptq.gptq_fp8_channel(w[:, order].contiguous(), calibrated(x[:, order])).weight
    assert (straight[:, order] != shuffled).float().mean() < 0.02


def test_shapes_are_checked() -> None:
    factors = calibrated(inputs())
    with pytest.raises(ValueError, match="256 columns, the weight 128"):
        gptq.gptq_fp8_channel(weight(columns=128), factors)
    with pytest.raises(ValueError, match=r"shape \[N, K\]"):
        gptq.gptq_fp8_channel(weight()[None], factors)
    with pytest.raises(ValueError, match="groups of 96"):
        gptq.gptq_integer(weight(), factors, bits=4, group_size=96, symmetric=True)
