"""The counters of a vLLM server (`/metrics`, Prometheus text), and what a difference of two readings says."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from sparkquant.marlin.noun import Noun

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

PREFIX = "vllm:"
DRAFTS, DRAFTED, ACCEPTED = "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
CACHE_QUERIES, CACHE_HITS = "prefix_cache_queries", "prefix_cache_hits"
GENERATED, CORRUPTED, PREEMPTED = "generation_tokens", "corrupted_requests", "num_preemptions"
CACHE_INFO = "cache_config_info"


class Acceptance(Noun):
    """Drafts of an interval: `rates` is the share accepted by position, `length` tokens per step (1 + accepted/drafts).

    drafts are steps in which something was drafted; `drafted` and `accepted` count tokens.
    """

    drafts: Annotated[int, Field(ge=0)]
    drafted: Annotated[int, Field(ge=0)]
    accepted: Annotated[int, Field(ge=0)]
    rates: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]

    @property
    def length(self) -> float:
        """Mean tokens of a step."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


class Metrics(Noun):
    """`counters` by name without `vllm:` and `_total`, summed over engines; `positions` accepted tokens by position.

    cache  labels of `cache_config_info`: block size, prefix caching, size of the KV cache
    """

    counters: Mapping[str, float]
    positions: tuple[float, ...]
    cache: Mapping[str, str]

    @property
    def known(self) -> bool:
        """The server counts at all."""
        return bool(self.counters)

    def since(self, before: Metrics, name: str) -> float | None:
        """How much a counter has grown; None where the server does not count it."""
        return self.counters[name] - before.counters.get(name, 0.0) if name in self.counters else None

    def acceptance(self, before: Metrics) -> Acceptance | None:
        """Of the drafts since another reading; None where the server does not draft."""
        drafts = self.since(before, DRAFTS)
        if drafts is None or drafts < 0:  # the server was started again in between
            return None
        earlier = (*before.positions, *(0.0 for _ in self.positions))
        grown = [max(0.0, now - then) for now, then in zip(self.positions, earlier, strict=False)]
        return Acceptance(
            drafts=int(drafts), drafted=max(0, int(self.since(before, DRAFTED) or 0)),
            accepted=max(0, int(self.since(before, ACCEPTED) or 0)),
            rates=tuple(value / drafts for value in grown) if drafts else (),
        )  # fmt: skip

    def cache_hit_rate(self, before: Metrics) -> float | None:
        """Share of prompt tokens that came from the prefix cache; None where it is not counted or not asked."""
        queries, hits = self.since(before, CACHE_QUERIES), self.since(before, CACHE_HITS)
        return min(1.0, max(0.0, hits / queries)) if hits is not None and queries and queries > 0 else None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return self.model_dump(mode="json")


def parse_metrics(text: str) -> Metrics:
    """What a page of metrics says; lines that are none are passed over."""
    counters: dict[str, float] = {}
    positions: dict[int, float] = {}
    cache: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or not match[1].startswith(PREFIX):
            continue
        name = match[1].removeprefix(PREFIX).removesuffix("_total")
        labels = dict(_LABEL.findall(match[2] or ""))
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        if name == CACHE_INFO:
            cache = labels
        elif name == BY_POSITION:
            at = labels.get("position", "")
            if at.isdecimal() and int(at) < 256:
                positions[int(at)] = positions.get(int(at), 0.0) + value
        elif not name.endswith(("_bucket", "_created")):
            counters[name] = counters.get(name, 0.0) + value
    return Metrics(
        counters=counters, positions=tuple(positions.get(i, 0.0) for i in range(max(positions, default=-1) + 1)),
        cache=cache,
    )  # fmt: skip
