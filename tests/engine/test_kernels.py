"""Which kernel takes a layer: the tables, row by row."""

from __future__ import annotations

import pytest

from sparkquant.engine.kernels import MARLIN_ACTIVATIONS, Form, route_experts
from sparkquant.engine.rules import atomic_add_applies, marlin_padding, route
from sparkquant.schemes import Scheme, make_scheme

W4 = make_scheme("w4a16")


@pytest.mark.parametrize(
    ("scheme", "n", "k", "options", "kernel"),
    [
        (W4, 5120, 17408, {}, "Marlin"),
        (W4, 5120, 17408, {"capability": "9.0"}, "Machete"),
        (make_scheme("w4a16", group_size=32), 5120, 17408, {"capability": "9.0"}, "Marlin"),
        (make_scheme("w4a16", group_size=32), 5120, 17408, {"capability": "9.0", "version": "0.33"}, "Humming"),
        (make_scheme("w4a16", symmetric=False), 5120, 17408, {}, "Marlin"),
        (make_scheme("w8a16"), 5120, 17408, {"capability": "8.6"}, "Marlin"),
        (make_scheme("w8a16", group_size=-1), 5120, 17408, {"capability": "8.6"}, "AllSpark"),
        (make_scheme("w8a16", group_size=-1), 5120, 17408, {"capability": "8.6", "version": "0.33"}, "Marlin"),
        (make_scheme("nvfp4a16"), 5120, 17408, {}, "Marlin"),
        (make_scheme("nvfp4a16"), 5120, 17408, {"capability": "9.0"}, "Marlin"),
        (make_scheme("nvfp4a16"), 5120, 17408, {"capability": "9.0", "version": "0.33"}, "Humming"),
        (make_scheme("nvfp4a16"), 5120, 17408, {"capability": "10.0", "version": "0.33"}, "FlashInferCuteDslW4A16"),
        (make_scheme("nvfp4a16"), 5120, 24, {}, ""),
        (make_scheme("fp8"), 5120, 17408, {}, "Cutlass"),
        (make_scheme("fp8"), 5120, 17408, {"capability": "8.6"}, "Humming or Marlin"),
        (make_scheme("fp8_block"), 5120, 17408, {}, "DeepGEMM or Cutlass"),
        (make_scheme("fp8_block"), 5120, 17408, {"capability": "8.6"}, "Marlin"),
        (W4, 5120, 17408, {"capability": "7.0"}, ""),
        (W4, 0, 128, {}, ""),
        (W4, 512, 192, {"k_full": 384}, ""),
        (Scheme("w4a16", 4, 16, True, "pack-quantized"), 512, 256, {}, ""),
        (Scheme("w8a16", 8, 128, False, "pack-quantized"), 512, 256, {}, ""),
    ],
)
def test_routes(scheme: Scheme, n: int, k: int, options: dict[str, str], kernel: str) -> None:
    taken = route(scheme, n, k, **options)  # type: ignore[arg-type]
    assert taken.kernel == kernel
    assert taken.reason


def test_padding_takes_the_smaller_tile() -> None:
    assert marlin_padding(64, 128, 128) is None
    assert marlin_padding(128, 64, 64) is None
    assert marlin_padding(96, 5120, 128) == (128, 5120)
    assert marlin_padding(64, 64, 32) == (64, 128)
    assert route(W4, 96, 5120).padded == (128, 5120)
    assert "padded" in route(W4, 96, 5120).reason


@pytest.mark.parametrize(
    ("n", "k", "options", "expected"),
    [
        (1024, 2048, {}, True),
        (2048, 2048, {}, False),
        (1024, 1920, {}, False),
        (1024, 2048, {"capability": "8.6"}, False),
        (1024, 2048, {"capability": "8.6", "bfloat16": False}, True),
    ],
)
def test_atomic_add_is_a_narrow_switch(n: int, k: int, options: dict[str, str], expected: bool) -> None:
    assert atomic_add_applies(n, k, **options) is expected  # type: ignore[arg-type]


def test_a_capability_is_two_numbers() -> None:
    with pytest.raises(ValueError, match=r"12\.1"):
        route(W4, 128, 128, capability="sm_121")


@pytest.mark.parametrize("scheme", [W4, make_scheme("nvfp4a16")])
@pytest.mark.parametrize("activation", [*sorted(MARLIN_ACTIVATIONS), "", "relu", "quick_gelu", "x" * 999])
def test_experts_need_an_activation_that_the_kernel_computes(scheme: Scheme, activation: str) -> None:
    taken = route_experts(scheme, 2048, 768, activation=activation)
    good = not activation or activation in MARLIN_ACTIVATIONS
    assert taken.kernel == ("Marlin MoE" if good else "")
    assert good or activation[:40] in taken.reason
    assert len(taken.reason) < 200


@pytest.mark.parametrize(
    ("n", "k", "k_full", "version", "kernel", "why"),
    [
        (512, 1024, 1024, "0.25", "Marlin", "activation order"),
        (512, 512, 1024, "0.25", "", "cannot be divided"),
        (96, 1024, 1024, "0.26", "", "nothing is padded"),
        (512, 1088, 1088, "0.25", "", "nothing is padded"),
        (512, 1024, 1024, "0.33", "", "no longer read"),
    ],
)
def test_activation_orders(n: int, k: int, k_full: int, version: str, kernel: str, why: str) -> None:
    scheme = make_scheme("w4a16", group_size=64)
    taken = route(scheme, n, k, version=version, k_full=k_full, form=Form("gptq", ordered=True))
    assert taken.kernel == kernel
    assert why in taken.reason


def test_awq_experts_have_four_bits() -> None:
    assert route_experts(make_scheme("w8a16"), 2048, 768, form=Form("awq")).kernel == ""
    assert route_experts(make_scheme("w4a16", symmetric=False), 2048, 768, form=Form("awq")).kernel == "Marlin MoE"


def test_experts_in_an_activation_order_are_slower() -> None:
    taken = route_experts(W4, 2048, 768, form=Form("gptq", ordered=True))
    assert taken.kernel == "Triton MoE"
    assert "activation order" in taken.reason


@pytest.mark.parametrize(
    ("producer", "group", "inner", "kernel"),
    [
        ("compressed-tensors", 128, 64, ""),  # raises: the scales of whole groups are divided over ranks
        ("compressed-tensors", 64, 64, "Marlin MoE"),
        ("compressed-tensors", -1, 72, "Marlin MoE"),
        ("gptq", 128, 64, "Triton MoE"),  # scales are repeated for groups of 64
        ("gptq", 128, 96, "Triton MoE"),  # and of 32
        ("awq", 128, 80, ""),  # smaller groups are not made
    ],
)
def test_groups_of_integer_experts_are_whole_on_every_rank(producer: str, group: int, inner: int, kernel: str) -> None:
    taken = route_experts(make_scheme("w4a16", group_size=group), 2048, inner, form=Form(producer))
    assert taken.kernel == kernel, taken.reason
    if not kernel:
        assert "a group would straddle two ranks" in taken.reason


@pytest.mark.parametrize(
    ("scheme", "inner", "good"),
    [("nvfp4a16", 232, False), ("nvfp4a16", 240, True), ("fp8_block", 192, False), ("fp8_block", 256, True)],
)
@pytest.mark.parametrize("version", ["0.25", "0.26", "0.33"])
def test_blocks_of_experts_are_whole_on_every_rank(scheme: str, inner: int, good: bool, version: str) -> None:
    taken = route_experts(make_scheme(scheme), 2048, inner, version=version)
    assert bool(taken.kernel) == good
    assert good or "a block of scales would be cut" in taken.reason
