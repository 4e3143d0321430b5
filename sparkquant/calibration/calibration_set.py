"""The rows that a calibrated method sees, and how they were made."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sparkquant.errors import Problem
from sparkquant.report import Check


def histogram(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """(longest, rows) in steps of powers of two from 32 on, without empty steps at the ends."""
    counts = Counter(max(32, 1 << (length - 1).bit_length()) for length in lengths)
    if not counts:
        return []
    bound, steps = min(counts), []
    while bound <= max(counts):
        steps.append((bound, counts[bound]))
        bound *= 2
    return steps


@dataclass(frozen=True)
class CalibrationSet:
    """Rows of token ids, one conversation or text per row, each of its own length: rows are never packed.

    sources   the name of the source of each row
    counts    per source: items read, dropped by reason, filtered, used and unused, rows and tokens
    made      digests of mix, data, template and tokenizer ("" where none took part)
    checks    what was found wrong or odd; a refusal that was allowed is a warning here
    problems  the dropped items one by one, with their places, for the owner of the data only
    """

    name: str
    rows: tuple[tuple[int, ...], ...] = field(repr=False)
    sources: tuple[str, ...] = field(repr=False)
    tokens_per_row: int
    seed: int
    made: Mapping[str, str]
    counts: Mapping[str, Mapping[str, Any]]
    kinds: Mapping[str, int]
    checks: tuple[Check, ...] = ()
    problems: tuple[Problem, ...] = field(default=(), repr=False)

    @property
    def tokens(self) -> int:
        """Token ids in all rows together."""
        return sum(map(len, self.rows))

    @cached_property
    def digest(self) -> str:
        """sha256 over the rows, their sources and how they were made: the identity of this calibration."""
        state = hashlib.sha256(json.dumps([self.tokens_per_row, self.seed, dict(sorted(self.made.items()))]).encode())
        for source, ids in zip(self.sources, self.rows, strict=True):
            state.update(f"{source} {' '.join(map(str, ids))}\n".encode())
        return state.hexdigest()

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped items of all sources by reason."""
        total: Counter[str] = Counter()
        for count in self.counts.values():
            total.update(count.get("dropped", {}))
        return dict(sorted(total.items()))

    def record(self) -> dict[str, Any]:
        """What may be published: digests and counts, never text, ids, or the places of files."""
        return {
            "name": self.name,
            "digest": self.digest,
            "rows": len(self.rows),
            "tokens": self.tokens,
            "tokens_per_row": self.tokens_per_row,
            "seed": self.seed,
            "made": dict(sorted(self.made.items())),
            "kinds": dict(self.kinds),
            "sources": {name: dict(count) for name, count in self.counts.items()},
            "dropped": self.dropped,
            "histogram": [list(step) for step in histogram(map(len, self.rows))],
            "checks": [{"id": check.id, "status": str(check.status)} for check in self.checks],
        }
