"""Kernels that the rules predict for a checkpoint, beside those that a log says ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparkquant.marlin.log_lines import FAMILIES
from sparkquant.marlin.server_log import ServerLog
from sparkquant.report import Report

Key = tuple[str, bool]
"""A scheme as logs call it, and whether experts are meant."""


def predicted(report: Report) -> dict[Key, tuple[str, ...]]:
    """Kernel families by scheme, from the table that `rules.kernel` measured; several where modules differ."""
    table = next((check.measured for check in report.checks if check.id == "rules.kernel"), None)
    found: dict[Key, tuple[str, ...]] = {}
    for row in table["rows"] if isinstance(table, Mapping) else ():
        key = (scheme_of(row["scheme"]), row["class"] == "experts")
        found[key] = tuple(dict.fromkeys((*found.get(key, ()), *_families(row))))
    return found


def scheme_of(label: str) -> str:
    """`w4a16 g128` -> `int`; the others are called alike."""
    return "int" if label.startswith(("w4a16", "w8a16")) else "nvfp4" if label.startswith("nvfp4") else "fp8"


def _families(row: Mapping[str, Any]) -> Iterator[str]:
    name = str(row["kernel"]).lower()
    yield from (family for family in FAMILIES if family in name)


def differences(report: Report, log: ServerLog) -> Iterator[str]:
    """Schemes whose kernel is not the predicted one, or is not named at all; a forced backend is no news."""
    for (scheme, experts), families in predicted(report).items():
        asked = log.moe_backend if experts else log.linear_backend
        ran = log.families(scheme, experts=experts)
        what = f"{scheme}{' experts' if experts else ''}"
        if not ran:
            yield f"the checkpoint holds {what}, and no line of the log names their kernel"
        elif asked in ("", "auto") and families and not set(ran) <= set(families):
            yield f"{what}: the rules predict {' or '.join(families)}, and {', '.join(ran)} ran"
