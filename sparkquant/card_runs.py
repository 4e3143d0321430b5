"""Runs on an engine in the model card: what `validate` and `bench` recorded, with the conditions that they state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparkquant.evidence import Evidence

MAX_ROWS = 60


def validate_run(found: Evidence | None) -> Iterator[dict[str, Any]]:
    """The section of `validate`; none without a fresh record."""
    if found is None:
        return
    verdict = _part(found.result, "verdict")
    told = verdict.get("summary") or ""
    yield {
        "title": "Run on the engine",
        "told": f"{verdict.get('outcome', found.outcome)}, {found.record['date'][:10]}. {told}".strip()
        + " It speaks of the machine and version below alone.",
        "rows": list(_validate_rows(found.result))[:MAX_ROWS],
    }


def _validate_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "conditions" not in result:
        yield from _rows(result)
        return
    yield from _rows(_part(result, "conditions"))
    for role, run in _part(result, "runs").items():
        kernels = run.get("kernels") if isinstance(run, Mapping) else None
        if isinstance(kernels, list) and kernels:
            yield f"{role}: kernels", ", ".join(dict.fromkeys(str(_part(k, "").get("kernel")) for k in kernels))
        if isinstance(run, Mapping) and isinstance(run.get("acceptance"), Mapping):
            yield from _rows(run["acceptance"], f"{role}: drafts: ")
    for key, title in (("to_reference", "against the reference"), ("to_controls", "against a control")):
        yield from _rows(_part(result, key), f"{title}: ")


def bench_run(found: Evidence | None) -> Iterator[dict[str, Any]]:
    """The section of `bench`; none without a fresh record."""
    if found is None:
        return
    warnings = found.result.get("warnings")
    told = "".join(f" {text}." for text in warnings) if isinstance(warnings, list) else ""
    yield {
        "title": "Throughput",
        "told": f"Measured {found.record['date'][:10]}, under the conditions below and no others.{told}",
        "rows": list(_bench_rows(found.result))[:MAX_ROWS],
    }


def _bench_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    medians = _part(result, "medians")
    for kind, rate in _part(medians, "decode").items():
        yield f"decode, one stream, {kind}", f"{rate} tokens per second"
    for width, rate in _part(medians, "aggregate").items():
        yield f"{width} at once, together", f"{rate} tokens per second"
    for key, title, unit in (("prefill", "prefill", "tokens per second"), ("first_token", "first token", "seconds")):
        if key in medians:
            yield title, f"{medians[key]} {unit}"
    shown = {"medians", "decode", "aggregate", "prefill", "first_token", "warnings", "kind"} if medians else set()
    yield from _rows({key: value for key, value in result.items() if key not in shown})


def _part(fields: Any, key: str) -> Mapping[str, Any]:
    """A map inside a map (the map itself for an empty key); empty where there is none: a record may be anybody's."""
    found = fields.get(key) if key and isinstance(fields, Mapping) else fields
    return found if isinstance(found, Mapping) else {}


def _rows(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every plain value by its path; names of environment variables stay as they are."""
    for key, value in fields.items():
        name = f"{prefix}{key if key.isupper() else key.replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from _rows(value, f"{name}: ")
        elif isinstance(value, bool) or value is None:
            yield name, {True: "yes", False: "no", None: "none"}[value]
        elif isinstance(value, int):
            yield name, f"{value:,}"
        elif isinstance(value, float):
            yield name, f"{value:.4g}"
        elif isinstance(value, str):
            yield name, value or "none"
        elif all(isinstance(item, str | int | float) for item in value):
            yield name, ", ".join(map(str, value)) or "none"
