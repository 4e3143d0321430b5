"""Means over rows and their standard errors. Rows differ far more than results do: results are compared in pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """Difference of two results in KL, row by row: positive where the second one is further from the source."""

    rows: int
    mean: float
    se: float


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error of the mean; the error of a single value is None."""
    count = len(values)
    mean = sum(values) / max(1, count)
    if count < 2:
        return mean, None
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)


def paired_rows(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Mean of b - a over the rows, and its standard error (0 for a single row, which has none)."""
    mean, error = mean_and_error([y - x for x, y in zip(a, b, strict=True)])
    return Paired(len(a), mean, error or 0.0)
