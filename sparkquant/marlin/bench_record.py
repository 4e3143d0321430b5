"""`BenchRecord`: throughput with everything that it depends on. One without a stated condition cannot be made."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from sparkquant.errors import Problem, UsageError
from sparkquant.marlin.metrics import Acceptance
from sparkquant.marlin.noun import Noun

KIND = "sparkquant-bench"
MEASURED = (
    "decode", "aggregate", "prefill", "first_token", "acceptance", "cache", "lengths", "kv_cache_tokens",
    "distinct_prompts", "warm_up_rounds",
)  # fmt: skip
"""Fields that a measurement gives."""
FEWEST_ROUNDS = 3
NOTICEABLE_HITS = 0.01
"""Share of prompt tokens from the prefix cache that inflates a number (8 equal prompts: 11 % at concurrency 8)."""
NOTICEABLE_DRAFTS = 1.2
"""Tokens per step above which drafting, not the engine's speed, explains a rate."""

Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Measured(Noun):
    """Rounds after the warm-up, and their median. At least three."""

    rounds: Annotated[tuple[Positive, ...], Field(min_length=FEWEST_ROUNDS)]

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Largest difference between two rounds, as a share of the median."""
        return (max(self.rounds) - min(self.rounds)) / self.median


class Speculation(Noun):
    """`method` is `none` or the engine's name of it; `k` tokens per step, 0 without."""

    method: Text
    k: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _together(self) -> Speculation:
        if (self.method == "none") != (self.k == 0):
            raise ValueError("a method has a k, and none has none")
        return self


class Cache(Noun):
    """`state`: off, cold (on, and no prompt was served from it) or warm; `hit_rate` of the measured prompts."""

    state: Literal["off", "cold", "warm"]
    hit_rate: Annotated[float, Field(ge=0, le=1)]


class Lengths(Noun):
    """Mean tokens of prompts and answers, and the limit that answers had."""

    prompt: Positive
    output: Positive
    max_tokens: Annotated[int, Field(gt=0)]
    ended: Annotated[float, Field(ge=0, le=1)]


class BenchRecord(Noun):
    """One measurement. No field has a default: what is not known is not published.

    decode        tokens per second of one stream after its first token, by kind of prompt
    aggregate     tokens per second of all streams together, by concurrency ("1", "2", ...); mixed prompts
    prefill       prompt tokens per second at concurrency 1, up to the first token
    first_token   seconds to the first token at concurrency 1
    acceptance    of drafts, by kind of prompt, at concurrency 1; empty without speculation
    kv_cache_tokens   as the server states it
    thinking      whether the prompts let the model think
    versions      engine, and sparkquant
    environment   variables of the server that matter, empty when there were none
    """

    kind: Literal["sparkquant-bench"]
    model: Text
    versions: Annotated[Mapping[str, Text], Field(min_length=1)]
    capability: Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")]
    hardware: Text
    environment: Mapping[str, str]
    arguments: tuple[str, ...]
    speculation: Speculation
    thinking: bool
    cache: Cache
    lengths: Lengths
    kv_cache_tokens: Annotated[int, Field(gt=0)]
    prompts: Text
    distinct_prompts: Annotated[int, Field(gt=0)]
    warm_up_rounds: Annotated[int, Field(ge=1)]
    decode: Annotated[Mapping[str, Measured], Field(min_length=1)]
    aggregate: Annotated[Mapping[str, Measured], Field(min_length=1)]
    prefill: Measured
    first_token: Measured
    acceptance: Mapping[str, Acceptance]

    @model_validator(mode="after")
    def _drafts_are_counted(self) -> BenchRecord:
        if self.speculation.k and set(self.acceptance) != set(self.decode):
            raise ValueError("with speculation every kind of prompt has its acceptance")
        return self

    def warnings(self) -> Iterator[str]:
        """What explains the numbers other than the speed of the engine."""
        if self.cache.hit_rate > NOTICEABLE_HITS:
            yield f"{self.cache.hit_rate:.0%} of the prompt tokens came from the prefix cache: prefill is inflated"
        for kind, found in self.acceptance.items():
            if found.length > NOTICEABLE_DRAFTS:
                own = self.decode[kind].median / found.length
                yield (
                    f"{kind}: {found.length:.2f} tokens per step by drafting; {self.decode[kind].median:.1f} tok/s are"
                    f" {own:.1f} steps a second"
                )
        rates = [found.length for found in self.acceptance.values()]
        if rates and max(rates) > NOTICEABLE_DRAFTS * min(rates):
            yield "drafting helps the kinds of prompt differently: quote them apart"
        for name, measured in (*self.decode.items(), *self.aggregate.items()):
            if measured.spread > 0.2:
                yield f"{name}: the rounds differ by {measured.spread:.0%}: measure again on an idle machine"
        if self.lengths.ended < 0.5:
            yield f"{1 - self.lengths.ended:.0%} of the answers were cut at {self.lengths.max_tokens} tokens"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, with medians beside the rounds."""
        told = self.model_dump(mode="json")
        medians = {
            "decode": {kind: round(found.median, 3) for kind, found in self.decode.items()},
            "aggregate": {width: round(found.median, 3) for width, found in self.aggregate.items()},
            "prefill": round(self.prefill.median, 3), "first_token": round(self.first_token.median, 5),
        }  # fmt: skip
        return {**told, "medians": medians, "warnings": list(self.warnings())}


def make_record(fields: Mapping[str, Any]) -> BenchRecord:
    """A record, or UsageError with every field that is missing or makes no sense."""
    try:
        return BenchRecord.model_validate({"kind": KIND, **fields})
    except ValidationError as error:
        raise _refused([Problem(".".join(map(str, e["loc"])) or "record", e["msg"]) for e in error.errors()]) from None


def require_conditions(fields: Mapping[str, Any], later: Collection[str] = MEASURED) -> None:
    """The same UsageError before anything is measured, for what will not come `later`."""
    try:
        BenchRecord.model_validate({"kind": KIND, **fields})
    except ValidationError as error:
        told = [(e["loc"], e["msg"]) for e in error.errors() if e["loc"] and e["loc"][0] not in later]
        if told:
            raise _refused([Problem(".".join(map(str, loc)), what) for loc, what in told]) from None


def _refused(problems: list[Problem]) -> UsageError:
    return UsageError(
        "a benchmark without these conditions says nothing, so no record is made",
        hint="pass --server-log FILE, --capability C, --hardware TEXT and --env NAME=VALUE (or --env none)",
        problems=problems,
    )


def load_record(path: str | os.PathLike[str]) -> BenchRecord:
    """A record from a file. Raises UsageError when it is none."""
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {error}", hint="pass what `sparkquant bench --out` wrote") from None
    if isinstance(given, dict) and given.get("verb") == "bench":
        given = given.get("result")  # a record of evidence
    if not isinstance(given, dict) or given.get("kind") != KIND:
        raise UsageError(f"{path}: no record of a benchmark", hint="pass what `sparkquant bench --out` wrote")
    return make_record({key: value for key, value in given.items() if key not in ("kind", "medians", "warnings")})
