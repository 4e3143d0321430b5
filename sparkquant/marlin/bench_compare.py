"""Two benchmarks side by side: the ratios, and every condition that explains them better than the engine does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparkquant.marlin.bench_record import BenchRecord
from sparkquant.marlin.noun import Noun

POINTS = 0.05
"""Difference of acceptance at the first position that moves a rate."""
LONGER = 0.1
"""Difference of output length that does."""


class Row(Noun):
    """One number of both; `ratio` is b / a."""

    name: str
    a: float
    b: float
    ratio: float
    beyond_noise: bool


class Comparison(Noun):
    """`differing` are conditions that are not alike, `warnings` what explains the ratios."""

    rows: tuple[Row, ...]
    differing: dict[str, tuple[Any, Any]]
    warnings: tuple[str, ...]


def compare(a: BenchRecord, b: BenchRecord) -> Comparison:
    """All numbers that both have."""
    return Comparison(rows=tuple(_rows(a, b)), differing=dict(_differing(a, b)), warnings=tuple(_warnings(a, b)))


def _rows(a: BenchRecord, b: BenchRecord) -> Iterator[Row]:
    pairs = [(f"decode {kind}, tok/s", a.decode.get(kind), b.decode.get(kind)) for kind in a.decode]
    pairs += [
        (f"all of {width} streams, tok/s", a.aggregate.get(width), b.aggregate.get(width)) for width in a.aggregate
    ]
    pairs += [("prefill, tok/s", a.prefill, b.prefill), ("first token, s", a.first_token, b.first_token)]
    for name, left, right in pairs:
        if left is None or right is None:
            continue
        apart = min(left.rounds) > max(right.rounds) or max(left.rounds) < min(right.rounds)
        ratio = right.median / left.median
        yield Row(name=name, a=left.median, b=right.median, ratio=ratio, beyond_noise=apart)


CONDITIONS = (
    "capability", "hardware", "versions", "environment", "arguments", "speculation", "thinking", "prompts",
    "kv_cache_tokens",
)  # fmt: skip


def _differing(a: BenchRecord, b: BenchRecord) -> Iterator[tuple[str, tuple[Any, Any]]]:
    left, right = a.model_dump(mode="json"), b.model_dump(mode="json")
    for name in CONDITIONS:
        if left[name] != right[name]:
            yield name, (left[name], right[name])
    if left["cache"]["state"] != right["cache"]["state"]:
        yield "cache", (left["cache"]["state"], right["cache"]["state"])
    if left["lengths"]["max_tokens"] != right["lengths"]["max_tokens"]:
        yield "max_tokens", (left["lengths"]["max_tokens"], right["lengths"]["max_tokens"])


def _warnings(a: BenchRecord, b: BenchRecord) -> Iterator[str]:
    if (a.capability, a.hardware) != (b.capability, b.hardware):
        yield f"measured on different hardware: {a.hardware} ({a.capability}) and {b.hardware} ({b.capability})"
    if a.speculation != b.speculation:
        told = [f"{s.method} k={s.k}" for s in (a.speculation, b.speculation)]
        yield f"speculation differs ({told[0]}, {told[1]}): compare steps a second, not tokens"
    for kind in a.acceptance.keys() & b.acceptance.keys():
        left, right = a.acceptance[kind], b.acceptance[kind]
        if left.rates and right.rates and abs(left.rates[0] - right.rates[0]) > POINTS:
            yield (
                f"{kind}: drafts are accepted {left.rates[0]:.0%} and {right.rates[0]:.0%}: {left.length:.2f} and"
                f" {right.length:.2f} tokens per step explain a ratio of {right.length / left.length:.2f}"
            )
    if abs(a.cache.hit_rate - b.cache.hit_rate) > POINTS:
        yield f"prefix cache hits differ: {a.cache.hit_rate:.0%} and {b.cache.hit_rate:.0%}"
    if abs(a.lengths.output - b.lengths.output) > LONGER * max(a.lengths.output, b.lengths.output):
        yield f"answers have {a.lengths.output:.0f} and {b.lengths.output:.0f} tokens"
    if a.thinking != b.thinking:
        yield "one of them thinks"
    if a.prompts != b.prompts:
        yield "the prompts differ"
