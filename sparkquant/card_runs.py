"""Runs on an engine in the model card: what `validate` and `bench` recorded, with the conditions that they state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparkquant.evidence import Evidence

MAX_ROWS = 60


def validate_run(found: Evidence | None) -> Iterator[dict[str, Any]]:
    """The section of `validate`; none without a fresh record."""
    if found is not None:
        yield {
            "title": "Run on the engine",
            "told": f"{found.outcome}, {found.record['date'][:10]}. It speaks of the machine and version below alone.",
            "rows": list(_rows(found.result))[:MAX_ROWS],
        }


def bench_run(found: Evidence | None) -> Iterator[dict[str, Any]]:
    """The section of `bench`; none without a fresh record."""
    if found is not None:
        yield {
            "title": "Throughput",
            "told": f"Measured {found.record['date'][:10]}, under the conditions below and no others.",
            "rows": list(_rows(found.result))[:MAX_ROWS],
        }


def _rows(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in fields.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from _rows(value, f"{prefix}{key}: ")
        elif isinstance(value, bool) or value is None:
            yield name, {True: "yes", False: "no", None: "none"}[value]
        elif isinstance(value, int | float | str):
            yield (
                name,
                f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else value,
            )
