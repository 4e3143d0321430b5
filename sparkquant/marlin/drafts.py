"""Whether a draft head still drafts: its acceptance at the first position, beside the reference's."""

from __future__ import annotations

import math

from sparkquant.marlin.metrics import Acceptance
from sparkquant.marlin.thresholds import Thresholds

SIGMAS = 2.0
"""Greedy answers of two models part ways, so their drafts are other drafts: a drop counts beyond its own error."""


def complaint(mine: Acceptance | None, reference: Acceptance | None, limits: Thresholds) -> str:
    """What speaks against it; "" when nothing does, or when there are too few drafts to say."""
    if not enough(mine, limits) or mine is None:
        return ""
    first = mine.rates[0]
    if reference is None or not enough(reference, limits):
        if reference is None and first < limits.acceptance_least:
            return f"{first:.0%} of the drafts are accepted at the first position: drafting costs more than it brings"
        return ""
    usual = reference.rates[0]
    error = SIGMAS * math.hypot(_error(first, mine.drafts), _error(usual, reference.drafts))
    if first < usual - limits.acceptance_drop - error or first < limits.acceptance_share * usual - error:
        return f"{first:.1%} of the drafts are accepted at the first position, {usual:.1%} of the reference's"
    if first < limits.acceptance_least <= usual:
        return f"{first:.0%} of the drafts are accepted at the first position: drafting costs more than it brings"
    return ""


def enough(found: Acceptance | None, limits: Thresholds) -> bool:
    """There are drafts enough to speak of a rate."""
    return found is not None and found.drafts >= limits.fewest_drafts and bool(found.rates)


def _error(rate: float, count: int) -> float:
    """Standard error of a rate."""
    return math.sqrt(max(rate * (1 - rate), 0.0) / max(count, 1))
