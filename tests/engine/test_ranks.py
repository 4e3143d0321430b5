"""Sizes over which vLLM can split published models, worked out by hand from their heads."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from sparkquant.engine.ranks import ALWAYS, Shared, letters_of
from sparkquant.layouts import layout_for
from sparkquant.sizes import sizes_of
from tests.data.published import QWEN3_5_27B, QWEN3_5_35B_A3B, QWEN3_NEXT_80B_A3B
from tests.data.shapes import tensor_shapes
from tests.families.configs import CASES
from tests.families.published import PUBLISHED
from tests.families.shapes import SHAPES, shapes_of

TRIED = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)


def shared(config: dict[str, Any]) -> Shared:
    layout = layout_for(config)
    names = shapes_of(config) if config["model_type"] in SHAPES else tensor_shapes(config)
    rules = [rule for name in names if (rule := layout.rule_of(name)) is not None]
    assert len(rules) == len(names)
    return Shared(layout.sizes, letters_of(rules))


@pytest.mark.parametrize(
    ("config", "good"),
    [
        # 24 heads, 4 key/value heads, 16 and 48 heads of the delta net.
        pytest.param(QWEN3_5_27B, [1, 2, 4, 8], id="27b"),
        # 16 heads, 2 key/value heads, 16 and 32 heads of the delta net, experts 512 wide.
        pytest.param(QWEN3_5_35B_A3B, [1, 2, 4, 8, 16], id="35b-a3b"),
        pytest.param(QWEN3_NEXT_80B_A3B, [1, 2, 4, 8, 16], id="80b-a3b"),
        # 32 heads of latent attention and of KDA; key/value heads are not asked there.
        pytest.param(PUBLISHED["Kimi-Linear-48B-A3B"].config, [1, 2, 4, 8, 16, 32], id="kimi"),
        # 32 heads, 2 key/value heads, 64 heads of the recurrence in 8 groups.
        pytest.param(PUBLISHED["Nemotron-3-Nano-30B-A3B"].config, [1, 2, 4, 8], id="nemotron"),
        # 32 heads, 8 key/value heads, 128 heads of the recurrence in a single group, which is repeated.
        pytest.param(PUBLISHED["Granite-4.0-H-Small"].config, [1, 2, 4, 8, 16, 32], id="granite"),
    ],
)
def test_published_models_fit_the_sizes_that_their_heads_allow(config: dict[str, Any], good: list[int]) -> None:
    assert [ranks for ranks in TRIED if not list(shared(config).faults(ranks))] == good


def with_text(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    changed.get("text_config", changed).update(fields)
    return changed


THIRDS = {
    "num_key_value_heads": 3, "linear_num_key_heads": 18, "intermediate_size": 17406,
}  # fmt: skip
"""All else of the 27B divides by three."""


@pytest.mark.parametrize(
    ("fields", "ranks", "says"),
    [
        ({}, 16, "the number of attention heads, 24 (num_attention_heads), does not divide over 16 ranks"),
        (
            {"num_attention_heads": 48, "num_key_value_heads": 12},
            8,
            "the number of key/value heads, 12 (num_key_value_heads), neither divides over 8 ranks nor can it be",
        ),
        (
            {"linear_num_key_heads": 3},
            2,
            "the number of key heads of the linear attention, 3 (linear_num_key_heads), does not divide over 2 ranks",
        ),
        (
            {"linear_num_value_heads": 36},
            8,
            "the number of value heads of the linear attention, 36 (linear_num_value_heads), does not divide over",
        ),
        ({"intermediate_size": 17412}, 8, "the inner width of the MLP, 17412 (intermediate_size), does not divide"),
        (THIRDS, 3, "the vocabulary, 248320 (vocab_size), padded to a multiple of 64, does not divide over 3 ranks"),
    ],
)
def test_what_does_not_divide_is_named_with_its_field(fields: dict[str, Any], ranks: int, says: str) -> None:
    faults = list(shared(with_text(QWEN3_5_27B, **fields)).faults(ranks))
    assert len(faults) == 1, faults
    assert faults[0].startswith(says)


def test_more_groups_than_one_must_divide() -> None:
    config = PUBLISHED["Nemotron-3-Nano-30B-A3B"].config
    (fault,) = shared({**config, "n_groups": 8}).faults(16)
    assert fault == (
        "the number of groups of the recurrence, 8 (n_groups), does not divide over 16 ranks,"
        " and only a single group is repeated"
    )
    assert not list(shared({**config, "n_groups": 1}).faults(16))


@pytest.mark.parametrize("case", CASES)
def test_every_family_fits_one_rank_and_no_thousand(case: str) -> None:
    """1009 is prime, and wider than every small model."""
    found = shared(CASES[case])
    assert not list(found.faults(1))
    assert list(found.faults(1009))
    assert found.fitting.startswith("of 1, 2, 4, 8, 16 these fit: 1")


def test_an_unknown_family_is_asked_for_its_attention_heads() -> None:
    strange = Shared(sizes_of({"num_attention_heads": 12, "num_key_value_heads": 5, "vocab_size": 7}, {}), ALWAYS)
    assert [ranks for ranks in TRIED if not list(strange.faults(ranks))] == [1, 2, 3, 4, 6, 12]
    assert not list(Shared(sizes_of({"num_attention_heads": "many"}, {}), ALWAYS).faults(3))
