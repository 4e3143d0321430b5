"""What every way of quantizing a decision says in the same words. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from sparkquant.decisions import Decision
from sparkquant.errors import NonFiniteWeight
from sparkquant.schemes import Scheme


def planned_scheme(decision: Decision) -> Scheme:
    """The scheme of a decision that has one."""
    if decision.scheme is None:
        raise ValueError(f"{decision.tensor} is kept by the plan")
    return decision.scheme


def not_finite(tensor: str, position: Sequence[int], value: float) -> NonFiniteWeight:
    """The error for a source weight that is NaN or infinite."""
    return NonFiniteWeight(
        f"{tensor}: element {list(position)} is {value}",
        hint="the source is damaged: fetch the shard again, or ask its author",
    )
