"""The recipe's limits: kept, violated, without meaning, and not measurable are four different things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkquant.drafting import NO_HEAD
from sparkquant.errors import CheckpointError
from sparkquant.evaluation import Evaluation
from sparkquant.limits import FEWEST_DRAFTS, check_limits, limits_of
from sparkquant.recipe import Accept
from sparkquant.report import Status
from tests.evaluation.conftest import EXAMPLE, set_limits


def numbers(**fields: Any) -> Evaluation:
    plain = {
        "rows": 2, "tokens": 20, "data": "d", "kl_mean": 0.02, "kl_se": 0.001, "kl_p99": 0.3, "kl_rows": (0.02, 0.02),
        "top1": 0.9, "nll": {}, "layers": (), "recall": {},
        "drafts": {"edit": 100, "fresh": 100},
        "acceptance": {
            "edit": {"source": [0.8, 0.5], "result": [0.78, 0.3]},
            "fresh": {"source": [0.6, 0.4], "result": [0.61, 0.4]},
        },
    }  # fmt: skip
    return Evaluation(**{**plain, **fields})


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ({"kl_mean": 0.02}, Status.PASS),
        ({"kl_mean": 0.0199}, Status.FAIL),
        ({"kl_p99": 0.31}, Status.PASS),
        ({"kl_p99": 0.29}, Status.FAIL),
        ({"top1_drop": 0.11}, Status.PASS),
        ({"top1_drop": 0.09}, Status.FAIL),
        ({"mtp_acceptance_drop": 0.021}, Status.PASS),
        ({"mtp_acceptance_drop": 0.019}, Status.FAIL),
    ],
)
def test_a_limit_is_one_check(limits: dict[str, float], status: Status) -> None:
    (check,) = check_limits(numbers(), Accept(**limits))
    ((name, limit),) = limits.items()
    assert check.id == f"accept.{name}"
    assert check.status is status
    assert check.expected == limit
    assert check.measured is not None
    assert numbers(checks=(check,)).ok is (status is Status.PASS)


def test_the_worst_set_decides() -> None:
    worse = {"edit": {"source": [0.8], "result": [0.8]}, "fresh": {"source": [0.6], "result": [0.5]}}
    (check,) = check_limits(numbers(acceptance=worse), Accept(mtp_acceptance_drop=0.05))
    assert check.status is Status.FAIL
    assert "(fresh)" in check.message


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"undrafted": {"source": NO_HEAD, "result": NO_HEAD}}, Status.SKIPPED, "the source has no draft head"),
        (
            {"undrafted": {"source": "of another kind", "result": "of another kind"}},
            Status.INCONCLUSIVE,
            "another kind",
        ),
        ({"undrafted": {"result": NO_HEAD}}, Status.FAIL, "cannot draft at all"),
        ({"drafts": {"edit": FEWEST_DRAFTS - 1, "fresh": 0}}, Status.INCONCLUSIVE, "49 drafts are too few"),
        ({"drafts": {}, "acceptance": {}}, Status.INCONCLUSIVE, "0 drafts"),
    ],
)
def test_without_a_measurement(fields: dict[str, Any], status: Status, words: str) -> None:
    (check,) = check_limits(numbers(**fields), Accept(mtp_acceptance_drop=0.05))
    assert check.status is status
    assert words in check.message
    assert numbers(checks=(check,)).ok is (status is Status.SKIPPED)


def test_no_recipe_has_no_limits(tmp_path: Path) -> None:
    assert limits_of(EXAMPLE) is None
    assert check_limits(numbers(), None) == ()
    assert check_limits(numbers(), Accept()) == ()


def test_limits_come_from_the_plan_or_else_from_the_recipe(tmp_path: Path) -> None:
    inner = tmp_path / "sparkquant"
    inner.mkdir()
    (inner / "recipe.yaml").write_text("extends: qwen-hybrid-w4a16\nname: mine\naccept: {kl_mean: 0.08}\n")
    assert limits_of(tmp_path) == Accept(kl_mean=0.08, mtp_acceptance_drop=0.05)
    (inner / "plan.json").write_text('{"recipe": {}}')
    assert limits_of(tmp_path) == Accept()
    set_limits(tmp_path, kl_p99=0.5)
    assert limits_of(tmp_path) == Accept(kl_p99=0.5)
    set_limits(tmp_path, kl_p99=-1)
    with pytest.raises(CheckpointError, match="accept limits cannot be read"):
        limits_of(tmp_path)
