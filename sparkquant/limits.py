"""The limits that a recipe sets for the quality of its results (`accept:`), held against what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from sparkquant.accept import Accept
from sparkquant.checkpoint import read_json
from sparkquant.drafting import NO_HEAD
from sparkquant.errors import CheckpointError
from sparkquant.recipe_files import load_recipe
from sparkquant.report import Check, Status

if TYPE_CHECKING:
    from sparkquant.evaluation import Evaluation

PLAN, RECIPE = "sparkquant/plan.json", "sparkquant/recipe.yaml"

FEWEST_DRAFTS = 50
"""With fewer drafts a rate says nothing about a drop of a few percent."""


def limits_of(folder: Path) -> Accept | None:
    """What the recipe of a result demands; None for results that carry neither plan nor recipe."""
    if (folder / PLAN).is_file():
        recipe = read_json(folder / PLAN).get("recipe")
        stated = recipe.get("accept") if isinstance(recipe, dict) else None
        try:
            return Accept.model_validate(stated or {})
        except ValidationError as error:
            raise CheckpointError(
                f"{folder / PLAN}: its accept limits cannot be read: {error.errors()[0]['msg']}",
                hint="restore the plan that the result was made with",
            ) from None
    return load_recipe(folder / RECIPE).accept if (folder / RECIPE).is_file() else None


def check_limits(evaluation: Evaluation, accept: Accept | None) -> tuple[Check, ...]:
    """One check per limit that is set."""
    return () if accept is None else tuple(_checks(evaluation, accept))


def _checks(evaluation: Evaluation, accept: Accept) -> Iterator[Check]:
    if accept.kl_mean is not None:
        yield _below("kl_mean", evaluation.kl_mean, accept.kl_mean, "mean KL in nats per token")
    if accept.kl_p99 is not None:
        yield _below("kl_p99", evaluation.kl_p99, accept.kl_p99, "99th percentile of KL in nats")
    if accept.top1_drop is not None:
        what = "share of positions with another most likely token"
        yield _below("top1_drop", 1 - evaluation.top1, accept.top1_drop, what)
    if accept.mtp_acceptance_drop is not None:
        yield _acceptance(evaluation, accept.mtp_acceptance_drop)


def _below(name: str, measured: float, limit: float, what: str, where: str = "") -> Check:
    status = Status.PASS if measured <= limit else Status.FAIL
    sign = "within" if status is Status.PASS else "over"
    message = f"{what}{where}: {measured:.4g}, {sign} the recipe's limit of {limit:g}"
    return Check(f"accept.{name}", status, message, measured=measured, expected=limit)


def _acceptance(evaluation: Evaluation, limit: float) -> Check:
    """The largest drop of any draft set at the first position: it decides whether drafting pays at all."""
    name = "accept.mtp_acceptance_drop"
    source, result = (evaluation.undrafted.get(side) for side in ("source", "result"))
    if source == NO_HEAD:
        return Check(name, Status.SKIPPED, "the source has no draft head", expected=limit)
    if source is not None:
        return Check(name, Status.INCONCLUSIVE, f"not measured: of the source, {source}", expected=limit)
    if result is not None:
        return Check(name, Status.FAIL, f"the result cannot draft at all: {result}", expected=limit)
    drops = {
        group: rates["source"][0] - rates["result"][0]
        for group, rates in evaluation.acceptance.items()
        if evaluation.drafts[group] >= FEWEST_DRAFTS
    }
    if not drops:
        counted = sum(evaluation.drafts.values())
        message = f"not measured: {counted} drafts are too few, take more or longer rows"
        return Check(name, Status.INCONCLUSIVE, message, expected=limit)
    worst = max(drops, key=lambda group: drops[group])
    return _below("mtp_acceptance_drop", drops[worst], limit, "drop of draft acceptance at position 1", f" ({worst})")
