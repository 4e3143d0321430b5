"""Results of verbs as their evidence states them. A record may come from anyone: it is checked before it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Length = Annotated[float, Field(ge=0)]


class Measured(BaseModel):
    """Keys that this version does not know are left alone; NaN and infinity are no numbers here."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class HistogramOf(Measured):
    """See `sparkquant.divergence.Histogram`."""

    edges: tuple[float, ...]
    counts: tuple[Count, ...]

    @property
    def whole(self) -> bool:
        """One count for each bin, and anything to count."""
        return len(self.edges) > 1 and len(self.counts) == len(self.edges) + 1 and sum(self.counts) > 0


class PositionsOf(Measured):
    """See `sparkquant.divergence.ByPosition`."""

    ends: tuple[Count, ...]
    kl: tuple[float, ...]
    tokens: tuple[Count, ...]

    @property
    def whole(self) -> bool:
        """One mean and one count for each range."""
        return 0 < len(self.ends) == len(self.kl) == len(self.tokens)


class Quality(Measured):
    """What `evaluate` found; see `sparkquant.evaluation.Evaluation`."""

    rows: Count
    tokens: Count
    data: str
    kl_mean: float
    kl_se: float | None = None
    kl_p99: float
    kl_rows: tuple[float, ...] = ()
    top1: Share
    nll: Mapping[str, float]
    layers: tuple[Length, ...] = ()
    recall: Mapping[str, Count] = {}
    drafts: Mapping[str, Count] = {}
    acceptance: Mapping[str, Mapping[str, tuple[Share, ...]]] = {}
    undrafted: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    kl_histogram: HistogramOf | None = None
    kl_positions: PositionsOf | None = None

    def first_position(self, side: str) -> float | None:
        """Acceptance of the first draft in the worst set of rows; None where nothing was drafted."""
        rates = [sides[side][0] for sides in self.acceptance.values() if sides.get(side)]
        return min(rates, default=None)


Record = TypeVar("Record", bound=Measured)


def parsed(kind: type[Record], result: Mapping[str, Any]) -> tuple[Record | None, str]:
    """(the result, "") or (None, what is wrong with it)."""
    try:
        return kind.model_validate(dict(result)), ""
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return None, f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
