"""Codes of a weight [N, K] that bring its outputs near to a target's, column by column.

`round_columns` is GPTQ: a column is rounded, the columns after it take up its error. `descend` then sets one code at a
time to its best value given all others (the coordinate descent of QuantEase, Behdin et al. 2023, arXiv 2309.01885),
and `refit` one scale at a time. Each of the latter two never raises (codes * step - target) damped (...)'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkquant.numerics import dispatch
from sparkquant.numerics.grid import Grid
from sparkquant.numerics.hessian import Factors
from sparkquant.numerics.machine import uses_kernels

_BLOCK = 128


def round_columns(target: Tensor, factors: Factors, grid: Grid) -> Tensor:
    """Codes, float32 [N, K], for a target float32 [N, K]."""
    codes = torch.empty_like(target)
    if _compiled(target):
        from sparkquant.numerics import kernels_columns as kernels

        upper, order = factors.upper.numpy(), factors.order.numpy()

        def work(job: tuple[int, slice]) -> None:
            rows = job[1]
            grids = _arrays(grid, rows)
            kernels.round_columns(target[rows].numpy(), upper, order, *grids, codes[rows].numpy())

        dispatch.run(work, _jobs(target), target)
        return codes
    wanted, columns = target[:, factors.order], factors.order.tolist()
    for start in range(0, len(columns), _BLOCK):
        block = columns[start : start + _BLOCK]
        stop = start + len(block)
        errors = torch.empty_like(wanted[:, start:stop])
        for i, column in enumerate(block, start):
            group = column // grid.size
            code = grid.nearest(wanted[:, i], group)
            codes[:, column] = code
            error = (wanted[:, i] - code * grid.step[:, group]) / factors.upper[i, i]
            wanted[:, i + 1 : stop] -= error[:, None] * factors.upper[i, i + 1 : stop]
            errors[:, i - start] = error
        wanted[:, stop:] -= errors @ factors.upper[start:stop, stop:]
    return codes


def gradient(codes: Tensor, target: Tensor, factors: Factors, grid: Grid) -> Tensor:
    """(codes * step - target) damped: half the derivative of the error, float32 [N, K]."""
    return (codes * grid.spread(codes.shape[1]) - target) @ factors.damped


def descend(codes: Tensor, slope: Tensor, factors: Factors, grid: Grid, *, sweeps: int) -> None:
    """Improve `codes` in place; `slope` is their gradient and is kept up to date."""
    if _compiled(codes):
        from sparkquant.numerics import kernels_columns as kernels

        matrix, order = factors.damped.numpy(), factors.order.numpy()

        def work(job: tuple[int, slice]) -> None:
            rows = job[1]
            state = codes[rows].numpy(), slope[rows].numpy()
            kernels.descend(*state, matrix, order, *_arrays(grid, rows), sweeps)

        dispatch.run(work, _jobs(codes), codes)
        return
    for _ in range(sweeps):
        for block in torch.split(factors.order, _BLOCK):
            _descend_block(codes, slope, factors.damped, grid, block)


def _descend_block(codes: Tensor, slope: Tensor, damped: Tensor, grid: Grid, block: Tensor) -> None:
    rows = damped[block]
    local, near = slope[:, block], rows[:, block]
    curvature = near.diagonal()
    moved = torch.zeros_like(local)
    for i, column in enumerate(block.tolist()):
        group = column // grid.size
        step = grid.step[:, group]
        code = grid.nearest(codes[:, column] * step - local[:, i] / curvature[i], group)
        moved[:, i] = (code - codes[:, column]) * step
        codes[:, column] = code
        local += moved[:, i, None] * near[i]
    slope += moved @ rows


def refit(
    codes: Tensor, slope: Tensor, factors: Factors, grid: Grid, storable: Callable[[Tensor, Tensor], Tensor]
) -> Grid:
    """The grid with each step in turn at its best value for these codes; `slope` is kept up to date.

    `storable(wanted, step)` rounds wanted steps [N] to what the format stores, or returns the old step.
    """
    steps = grid.step.clone()
    for group in range(steps.shape[1]):
        span = slice(group * grid.size, (group + 1) * grid.size)
        part, rows = codes[:, span], factors.damped[span]
        curvature = ((part @ rows[:, span]) * part).sum(1)
        wanted = steps[:, group] - (slope[:, span] * part).sum(1) / curvature
        step = storable(torch.where(curvature > 0, wanted, steps[:, group]), steps[:, group])
        slope += ((step - steps[:, group])[:, None] * part) @ rows
        steps[:, group] = step
    return grid._replace(step=steps)


def _compiled(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and uses_kernels()


_Array = np.ndarray[Any, Any]


def _arrays(grid: Grid, rows: slice) -> tuple[_Array, _Array, _Array, int, np.float32, np.float32]:
    """The grid of some rows, as the kernels take it."""
    step, low, high = grid.step[rows].numpy(), grid.low[rows].numpy(), grid.high[rows].numpy()
    return step, low, high, grid.size, np.float32(grid.least), np.float32(grid.anchor)


def _jobs(weight: Tensor) -> list[tuple[int, slice]]:
    """Rows in chunks of whole tiles, small enough for every thread to get some."""
    return [(0, slice(start, start + 64)) for start in range(0, weight.shape[0], 64)]
