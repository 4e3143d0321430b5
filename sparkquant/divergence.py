"""How the KL of single positions is distributed: by its size, and by the place in the row.

A mean hides both: a few positions that are far off, and an error that grows with the context, as one in the control of
a recurrence does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EDGES = tuple(float(f"{10 ** (step / 4):.4g}") for step in range(-28, 9))
"""Four bins for each power of ten, 1e-7 to 100 nats: what is smaller is rounding, what is larger does not occur."""

FIRST = 64
"""Positions in the first range; every range is as long as all before it together."""


@dataclass(frozen=True)
class Histogram:
    """Positions by their KL: `counts[i]` lie below `edges[i]` and not below the edge before; the last count is open."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class ByPosition:
    """Mean KL of the positions up to `ends[i]` (exclusive) and behind the end before it, and how many there are."""

    ends: tuple[int, ...]
    kl: tuple[float, ...]
    tokens: tuple[int, ...]


def histogram(values: Tensor) -> Histogram:
    """Count values [N] between the edges; rounding may leave some a little below zero, in the first bin."""
    bins = torch.bucketize(values.double(), torch.tensor(EDGES, dtype=torch.float64), right=True)
    return Histogram(EDGES, tuple(torch.bincount(bins, minlength=len(EDGES) + 1).tolist()))


def by_position(parts: Sequence[tuple[int, Tensor]]) -> ByPosition:
    """Means over ranges of positions; a part is the position that it begins at in its row, and its values [n]."""
    longest = max((start + len(values) for start, values in parts), default=0)
    sums = torch.zeros(longest, dtype=torch.float64)
    counts = torch.zeros(longest, dtype=torch.long)
    for start, values in parts:
        sums[start : start + len(values)] += values.double()
        counts[start : start + len(values)] += 1
    ends, begin = [], 0
    while begin < longest:
        ends.append(min(longest, max(FIRST, 2 * begin)))
        begin = ends[-1]
    spans = list(zip([0, *ends], ends, strict=False))
    tokens = tuple(int(counts[a:b].sum()) for a, b in spans)
    return ByPosition(tuple(ends), tuple(float(sums[a:b].sum()) / int(counts[a:b].sum()) for a, b in spans), tokens)
