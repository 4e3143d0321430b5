"""Fusion groups as a whole: the package only asks a tensor for its group."""

from __future__ import annotations

from collections.abc import Mapping

from sparkquant.layers import Placement


def fusion_groups(placements: Mapping[str, Placement]) -> dict[str, set[str]]:
    """Linear tensors by the engine module that they are loaded into."""
    found: dict[str, set[str]] = {}
    for name, placement in placements.items():
        if placement.rule.linear:
            found.setdefault(placement.group, set()).add(name)
    return found
