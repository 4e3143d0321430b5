"""Results of verbs as their evidence states them. A record may come from anyone: it is checked before it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sparkquant.marlin.coherence import STRUCTURAL

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


class VerdictOf(Measured):
    """See `sparkquant.marlin.verdict.Verdict`."""

    outcome: str
    summary: str
    next: str = ""


class DistanceOf(Measured):
    """See `sparkquant.marlin.numbers.Divergence`: between two runs on the same rows, in nats per token."""

    rows: Count
    kl: float
    kl_se: float | None = None
    top1: Share


class AnswersOf(Measured):
    """Answers of one run at one concurrency; `findings` by number of the answer."""

    asked: Count
    failed: Count = 0
    mean_tokens: float | None = None
    findings: Mapping[str, tuple[Mapping[str, Any], ...]] = {}

    @property
    def sound(self) -> int:
        """Answers that came and are not structurally broken; one that a limit cut off is sound."""
        broken = [any(found.get("id") in STRUCTURAL for found in each) for each in self.findings.values()]
        return max(0, self.asked - self.failed - sum(broken))


class RunOf(Measured):
    """See `sparkquant.marlin.validation.run_json`."""

    failed: str = ""
    kernels: tuple[Mapping[str, Any], ...] = ()
    eager: bool | None = None
    environment: Mapping[str, Any] = {}
    answers: Mapping[str, AnswersOf] = {}
    kv_cache_tokens: Count | None = None

    @property
    def kernel_names(self) -> str:
        """The kernels that its log shows, each once."""
        return ", ".join(dict.fromkeys(str(found.get("kernel", "")) for found in self.kernels))


class Controls(Measured):
    """What `validate` found: the candidate, its controls and the reference, each a run of its own."""

    verdict: VerdictOf
    conditions: Mapping[str, Any] = {}
    runs: Mapping[str, RunOf] = {}
    to_controls: Mapping[str, DistanceOf | None] = {}
    to_reference: Mapping[str, DistanceOf | None] = {}
    notes: tuple[str, ...] = ()


class RoundsOf(Measured):
    """See `sparkquant.marlin.bench_record.Measured`."""

    rounds: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]

    @property
    def median(self) -> float:
        """Of the rounds."""
        ordered, middle = sorted(self.rounds), len(self.rounds) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Throughput(Measured):
    """What `bench` found; see `sparkquant.marlin.bench_record.BenchRecord`. `conditions` is the rest of the record."""

    decode: Mapping[str, RoundsOf]
    aggregate: Mapping[str, RoundsOf]
    prefill: RoundsOf
    first_token: RoundsOf
    warnings: tuple[str, ...] = ()
    conditions: Mapping[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _with_conditions(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        apart = {*cls.model_fields, "medians", "kind"}
        return {**given, "conditions": {key: value for key, value in given.items() if key not in apart}}


Record = TypeVar("Record", bound=Measured)


def parsed(kind: type[Record], result: Mapping[str, Any]) -> tuple[Record | None, str]:
    """(the result, "") or (None, what is wrong with it)."""
    try:
        return kind.model_validate(dict(result)), ""
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return None, f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
