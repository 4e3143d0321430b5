"""Compiled kernels of the solver: rows are independent, and sixteen of them fill the vector registers.

`target`, `codes` and `gradient` are float32 [R, K], `step`, `low` and `high` float32 [R, G]; a group is `size` columns.
``columns`` is the same in plain torch; sums are in another order, so that codes may differ where a rounding is close.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkquant.numerics.jit import jit

ROWS = 16
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_WHOLE = np.float32(1.5 * 2.0**23)
_EXPONENT = np.uint32(0x7F800000)
_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)


@jit
def nearest(value: Any, low: Any, high: Any, least: Any, anchor: Any) -> Any:
    """`Grid.nearest` of a value in units of its step."""
    clipped = min(max(value, low), high)
    if least == _ZERO:
        return np.float32(np.float32(clipped + _WHOLE) - _WHOLE)
    bits = np.float32(clipped).view(np.uint32)
    power = max(np.uint32(bits & _EXPONENT).view(np.float32), least) * anchor
    magnitude = np.float32(np.float32(np.uint32(bits & _MAGNITUDE).view(np.float32) + power) - power)
    return np.uint32(magnitude.view(np.uint32) | np.uint32(bits & _SIGN)).view(np.float32)


@jit
def load(source: Any, first: Any, order: Any, tile: Any) -> None:
    """Rows from `first` on, transposed: tile[i, r] = source[first + r, order[i]]; missing rows are ones."""
    rows = min(ROWS, source.shape[0] - first)
    for i in range(order.size):
        for r in range(ROWS):
            tile[i, r] = source[first + r, order[i]] if r < rows else _ONE


@jit
def store(tile: Any, first: Any, order: Any, out: Any) -> None:
    """The inverse of `load`."""
    for r in range(min(ROWS, out.shape[0] - first)):
        for i in range(order.size):
            out[first + r, order[i]] = tile[i, r]


@jit
def round_columns(
    target: Any, upper: Any, order: Any, step: Any, low: Any, high: Any, size: Any, least: Any, anchor: Any, codes: Any
) -> None:
    """Round columns in order; each rounding error moves the columns that are still to come."""
    columns, groups = order.size, np.arange(step.shape[1])
    wanted = np.empty((columns, ROWS), np.float32)
    steps = np.empty((step.shape[1], ROWS), np.float32)
    lows, highs = np.empty_like(steps), np.empty_like(steps)
    error = np.empty(ROWS, np.float32)
    for first in range(0, target.shape[0], ROWS):
        load(target, first, order, wanted)
        load(step, first, groups, steps)
        load(low, first, groups, lows)
        load(high, first, groups, highs)
        for i in range(columns):
            group = order[i] // size
            diagonal = upper[i, i]
            for r in range(ROWS):
                scale = steps[group, r]
                code = nearest(wanted[i, r] / scale, lows[group, r], highs[group, r], least, anchor)
                error[r] = (wanted[i, r] - code * scale) / diagonal
                wanted[i, r] = code
            for j in range(i + 1, columns):
                factor = upper[i, j]
                for r in range(ROWS):
                    wanted[j, r] -= factor * error[r]
        store(wanted, first, order, codes)


@jit
def descend(
    codes: Any,
    gradient: Any,
    matrix: Any,
    order: Any,
    step: Any,
    low: Any,
    high: Any,
    size: Any,
    least: Any,
    anchor: Any,
    sweeps: Any,
) -> None:
    """Set each code in turn to its best value, all others fixed; `gradient` follows."""
    columns, groups = order.size, np.arange(step.shape[1])
    natural = np.arange(columns)
    held, slope = np.empty((columns, ROWS), np.float32), np.empty((columns, ROWS), np.float32)
    steps = np.empty((step.shape[1], ROWS), np.float32)
    lows, highs = np.empty_like(steps), np.empty_like(steps)
    moved = np.empty(ROWS, np.float32)
    for first in range(0, codes.shape[0], ROWS):
        load(codes, first, natural, held)
        load(gradient, first, natural, slope)
        load(step, first, groups, steps)
        load(low, first, groups, lows)
        load(high, first, groups, highs)
        for _ in range(sweeps):
            changes = 0
            for i in range(columns):
                k = order[i]
                group = k // size
                curvature = matrix[k, k]
                for r in range(ROWS):
                    scale = steps[group, r]
                    best = (held[k, r] * scale - slope[k, r] / curvature) / scale
                    code = nearest(best, lows[group, r], highs[group, r], least, anchor)
                    moved[r] = (code - held[k, r]) * scale
                    held[k, r] = code
                changed = 0
                for r in range(ROWS):
                    changed += moved[r] != _ZERO
                if changed:
                    changes += 1
                    for j in range(columns):
                        factor = matrix[k, j]
                        for r in range(ROWS):
                            slope[j, r] += factor * moved[r]
            if changes == 0:
                break
        store(held, first, natural, codes)
        store(slope, first, natural, gradient)
