"""Compiled kernels of the integer formats, one chunk of rows a call.

`x` is a chunk [R, K] of float32, or of bfloat16 seen as uint16. Scales are bfloat16 seen as uint16
[R, G], zero points int8 [R, G]. ``reference`` and ``search`` are the twins that give the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkquant.numerics.jit import jit
from sparkquant.numerics.kernels_tile import (
    EPS,
    LANES,
    ROUND,
    SNAP,
    TILE,
    TINY,
    bfloat16_bits,
    fold,
    largest_bits,
    load_importance,
    load_tile,
    magnitude_bits,
    magnitude_float,
    pack_nibbles,
    reciprocals,
    to_bfloat16,
    to_float,
    widen,
)

_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_INT4 = np.float32(-8.0)  # the lowest code tells the width


@jit
def minmax_groups(x: Any, start: Any, size: int, steps: Any, limit: Any, far: Any, step: Any) -> Any:
    """step = largest magnitude / steps (7.5 or 127.5), at most `limit`, of the groups of `size` from x[start] on.

    Returns the largest magnitude of all as bits. `far` is room.
    """
    most = magnitude_bits(x[start])
    for i in range(step.size):
        bits = largest_bits(x, start + np.uintp(i) * np.uintp(size), size)
        most = bits if bits > most else most
        far[i] = magnitude_float(bits)
    for i in range(step.size):
        value = far[i] / steps
        value = to_bfloat16(value if value < limit else limit)
        step[i] = value if value >= TINY else EPS
    return most


@jit
def minmax_symmetric(x: Any, scale: Any, steps: Any, limit: Any) -> Any:
    """Scales [R, G] of x [R, K]; returns the largest magnitude as bits."""
    flat = x.ravel()
    far = np.empty(scale.shape[1], np.float32)
    step = np.empty(scale.shape[1], np.float32)
    most = np.uint32(0)
    for r in range(x.shape[0]):
        start = np.uintp(r) * np.uintp(x.shape[1])
        bits = minmax_groups(flat, start, x.shape[1] // step.size, steps, limit, far, step)
        most = max(most, np.uint32(bits))
        for i in range(step.size):
            scale[r, i] = bfloat16_bits(step[i])
    return most


@jit
def nearest_symmetric(x: Any, scale: Any, steps: Any, limit: Any, floor: Any, packed: Any) -> Any:
    """`minmax_symmetric` and `encode` in one pass, which is what memory allows a core."""
    flat = x.ravel()
    far = np.empty(scale.shape[1], np.float32)
    step = np.empty(scale.shape[1], np.float32)
    zeros = np.zeros(scale.shape[1], np.float32)
    codes = np.zeros(packed.shape[1] * (2 if floor == _INT4 else 1), np.uint8)
    most = np.uint32(0)
    for r in range(x.shape[0]):
        start = np.uintp(r) * np.uintp(x.shape[1])
        bits = minmax_groups(flat, start, x.shape[1] // step.size, steps, limit, far, step)
        most = max(most, np.uint32(bits))
        for i in range(step.size):
            scale[r, i] = bfloat16_bits(step[i])
        encode_groups(flat, start, x.shape[1] // step.size, step, zeros, floor, codes)
        pack_row(codes, floor, packed, r)
    return most


@jit
def zero_point(low: Any, scale: Any, floor: Any) -> Any:
    """The code (floor .. -floor - 1) that stands for zero when `low` is to get the code floor."""
    wanted = min(max(floor - low / scale, floor), -floor - np.float32(1.0))
    return (wanted + ROUND) - ROUND


@jit
def minmax_asymmetric(x: Any, scale: Any, zeros: Any, floor: Any, steps: Any, limit: Any) -> Any:
    """scale = half the range / steps; the range includes zero. `floor` is the lowest code.

    Returns the largest magnitude as bits.
    """
    size = x.shape[1] // scale.shape[1]
    buffer = np.empty(x.shape[1], np.float32)
    most = np.uint32(0)
    for r in range(x.shape[0]):
        most = max(most, np.uint32(largest_bits(x[r], np.uintp(0), x.shape[1])))
        widen(x[r], buffer)
        for i in range(scale.shape[1]):
            low = _ZERO
            high = _ZERO
            for value in buffer[i * size : (i + 1) * size]:
                low = min(low, value)
                high = max(high, value)
            # Halves: the full range of float32 would overflow.
            value = to_bfloat16(min((high * _HALF - low * _HALF) / steps, limit))
            value = value if value >= TINY else EPS
            scale[r, i] = bfloat16_bits(value)
            zeros[r, i] = np.int8(zero_point(low, value, floor))
    return most


@jit
def encode(x: Any, scale: Any, zeros: Any, floor: Any, packed: Any) -> None:
    """Round x / scale + zero to codes and pack them; `packed` is uint8 [R, 4 * words]."""
    flat = x.ravel()
    step = np.empty(scale.shape[1], np.float32)
    zero = np.empty(scale.shape[1], np.float32)
    codes = np.zeros(packed.shape[1] * (2 if floor == _INT4 else 1), np.uint8)
    for r in range(x.shape[0]):
        for i in range(step.size):
            step[i] = to_float(scale[r, i])
            zero[i] = np.float32(zeros[r, i])
        start = np.uintp(r) * np.uintp(x.shape[1])
        encode_groups(flat, start, x.shape[1] // step.size, step, zero, floor, codes)
        pack_row(codes, floor, packed, r)


@jit
def encode_groups(x: Any, start: Any, size: int, step: Any, zero: Any, floor: Any, codes: Any) -> None:
    """Unsigned codes of the groups of `size` from x[start] on, a byte each."""
    for i in range(step.size):
        at = np.uintp(i) * np.uintp(size)
        # The type of x is known when this is compiled, so that a test of it costs nothing.
        if x.itemsize == 2 and abs(step[i]) >= TINY:
            codes_by_reciprocal(x, start + at, size, step[i], zero[i], floor, codes, at)
        else:
            codes_by_division(x, start + at, size, step[i], zero[i], floor, codes, at)


@jit
def codes_by_division(x: Any, first: Any, size: int, step: Any, zero: Any, floor: Any, codes: Any, at: Any) -> None:
    """Codes of x[first : first + size] / step + zero."""
    ceiling = -floor - np.float32(1.0)
    offset = np.uint32(np.int32(-floor))
    for j in range(size):
        t = to_float(x[first + np.uintp(j)]) / step + zero
        t = t if t > floor else floor
        t = t if t < ceiling else ceiling
        codes[at + np.uintp(j)] = np.uint8(np.float32(t + ROUND).view(np.uint32) + offset)


@jit
def codes_by_reciprocal(x: Any, first: Any, size: int, step: Any, zero: Any, floor: Any, codes: Any, at: Any) -> None:
    """`codes_by_division` for bfloat16 x and step, without a division each.

    A quotient of two 8-bit significands is half way between two codes, or more than 2**-11 away from there. The product
    with the reciprocal is wrong by less than 2**-14, so that rounding it to multiples of 2**-13 restores the halves.
    """
    ceiling = -floor - np.float32(1.0)
    offset = np.uint32(np.int32(-floor))
    inverse = np.float32(1.0) / step
    for j in range(size):
        t = to_float(x[first + np.uintp(j)]) * inverse + zero
        t = t if t > floor else floor
        t = t if t < ceiling else ceiling
        t = (t + SNAP) - SNAP
        codes[at + np.uintp(j)] = np.uint8(np.float32(t + ROUND).view(np.uint32) + offset)


@jit
def pack_row(codes: Any, floor: Any, packed: Any, r: int) -> None:
    """Store a row of codes: two a byte when they have four bits."""
    out = packed.ravel()
    first = np.uintp(r) * np.uintp(packed.shape[1])
    if floor == _INT4:
        pack_nibbles(codes, out, first)
    else:
        for k in range(codes.size):
            out[first + np.uintp(k)] = codes[k]


@jit
def errors(tile: Any, weights: Any, scale: Any, low: Any, high: Any, work: Any) -> Any:
    """Weighted squared error of each lane's group, codes within low .. high; a row of `work`."""
    sums = work[:LANES]
    inverse = work[LANES]
    reciprocals(scale, inverse)
    sums[:] = _ZERO
    for j in range(tile.shape[0]):
        x = tile[j]
        w = weights[j]
        total = sums[j & (LANES - 1)]
        for lane in range(TILE):
            t = x[lane] * inverse[lane]
            t = t if t > low[lane] else low[lane]
            t = t if t < high[lane] else high[lane]
            d = x[lane] - ((t + ROUND) - ROUND) * scale[lane]
            total[lane] += w[lane] * (d * d)
    fold(sums)
    return sums[0]


@jit
def refit(tile: Any, weights: Any, scale: Any, low: Any, high: Any, limit: Any, work: Any, out: Any) -> None:
    """Least-squares scale for the codes that `scale` gives: sum(w x q) / sum(w q q)."""
    sums = work[:LANES]
    squares = work[LANES + 1 : 2 * LANES + 1]
    inverse = work[LANES]
    reciprocals(scale, inverse)
    sums[:] = _ZERO
    squares[:] = _ZERO
    for j in range(tile.shape[0]):
        x = tile[j]
        w = weights[j]
        total = sums[j & (LANES - 1)]
        square = squares[j & (LANES - 1)]
        for lane in range(TILE):
            t = x[lane] * inverse[lane]
            t = t if t > low[lane] else low[lane]
            t = t if t < high[lane] else high[lane]
            q = (t + ROUND) - ROUND
            total[lane] += w[lane] * (x[lane] * q)
            square[lane] += w[lane] * (q * q)
    fold(sums)
    fold(squares)
    for lane in range(TILE):
        ratio = sums[0, lane] / squares[0, lane]
        # Not a number, zero or out of range: no better scale is known.
        usable = abs(ratio) <= limit and ratio != _ZERO
        out[lane] = to_bfloat16(ratio) if usable else scale[lane]


@jit
def keep_better(scale: Any, zero: Any, error: Any, best: Any, best_zero: Any, least: Any) -> None:
    """Replace the best scale and zero point of each lane where the error is smaller."""
    for lane in range(TILE):
        if error[lane] < least[lane]:
            best[lane] = scale[lane]
            best_zero[lane] = zero[lane]
            least[lane] = error[lane]


@jit
def extremes(tile: Any, low: Any, high: Any) -> None:
    """The smallest and largest element of each lane's group, both including zero."""
    low[:] = _ZERO
    high[:] = _ZERO
    for j in range(tile.shape[0]):
        x = tile[j]
        for lane in range(TILE):
            low[lane] = x[lane] if x[lane] < low[lane] else low[lane]
            high[lane] = x[lane] if x[lane] > high[lane] else high[lane]


@jit
def search_symmetric(x: Any, importance: Any, scale: Any, floor: Any, limit: Any, factors: Any, refits: int) -> None:
    """Improve min-max scales [R * G]; candidates put the largest element on the code `floor`."""
    size = x.shape[0] * x.shape[1] // scale.size
    groups = x.reshape(scale.size, size)
    tile = np.empty((size, TILE), np.float32)
    weights = np.ones((size, TILE), np.float32)
    work = np.empty((2 * LANES + 1, TILE), np.float32)
    lanes = np.zeros((9, TILE), np.float32)
    low, high, best, trial, zero = lanes[0], lanes[1], lanes[2], lanes[3], lanes[4]
    least, smallest, greatest, base = lanes[5], lanes[6], lanes[7], lanes[8]
    low[:] = floor
    high[:] = -floor - np.float32(1.0)
    for start in range(0, scale.size, TILE):
        count = min(TILE, scale.size - start)
        load_tile(groups, start, tile)
        if importance.size:
            load_importance(importance, start, weights)
        best[:] = EPS
        widen(scale[start : start + count], best)
        least[:] = errors(tile, weights, best, low, high, work)
        extremes(tile, smallest, greatest)
        for lane in range(TILE):
            far = greatest[lane] if greatest[lane] > -smallest[lane] else smallest[lane]
            base[lane] = far / floor
        for factor in factors:
            for lane in range(TILE):
                trial[lane] = to_bfloat16(min(max(base[lane] * factor, -limit), limit))
            error = errors(tile, weights, trial, low, high, work)
            keep_better(trial, zero, error, best, zero, least)
        for _ in range(refits):
            refit(tile, weights, best, low, high, limit, work, trial)
            error = errors(tile, weights, trial, low, high, work)
            keep_better(trial, zero, error, best, zero, least)
        for lane in range(count):
            scale[start + lane] = bfloat16_bits(best[lane])


@jit
def search_asymmetric(
    x: Any,
    importance: Any,
    scale: Any,
    zeros: Any,
    floor: Any,
    steps: Any,
    limit: Any,
    factors: Any,
    refits: int,
) -> None:
    """Improve min-max scales and zero points [R * G]; candidates shrink the range."""
    size = x.shape[0] * x.shape[1] // scale.size
    groups = x.reshape(scale.size, size)
    tile = np.empty((size, TILE), np.float32)
    weights = np.ones((size, TILE), np.float32)
    work = np.empty((2 * LANES + 1, TILE), np.float32)
    lanes = np.zeros((9, TILE), np.float32)
    low, high, best, best_zero, trial = lanes[0], lanes[1], lanes[2], lanes[3], lanes[4]
    zero, least, smallest, greatest = lanes[5], lanes[6], lanes[7], lanes[8]
    ceiling = -floor - np.float32(1.0)
    for start in range(0, scale.size, TILE):
        count = min(TILE, scale.size - start)
        load_tile(groups, start, tile)
        if importance.size:
            load_importance(importance, start, weights)
        best[:] = EPS
        widen(scale[start : start + count], best)
        for lane in range(count):
            best_zero[lane] = zeros[start + lane]
        low[:] = floor - best_zero
        high[:] = ceiling - best_zero
        least[:] = errors(tile, weights, best, low, high, work)
        extremes(tile, smallest, greatest)
        for factor in factors:
            for lane in range(TILE):
                step = (greatest[lane] * _HALF - smallest[lane] * _HALF) / steps
                value = to_bfloat16(min(step * factor, limit))
                trial[lane] = value if value >= TINY else EPS
                zero[lane] = zero_point(smallest[lane] * factor, trial[lane], floor)
                low[lane] = floor - zero[lane]
                high[lane] = ceiling - zero[lane]
            error = errors(tile, weights, trial, low, high, work)
            keep_better(trial, zero, error, best, best_zero, least)
        low[:] = floor - best_zero
        high[:] = ceiling - best_zero
        for _ in range(refits):
            refit(tile, weights, best, low, high, limit, work, trial)
            error = errors(tile, weights, trial, low, high, work)
            keep_better(trial, best_zero, error, best, best_zero, least)
        for lane in range(count):
            scale[start + lane] = bfloat16_bits(best[lane])
            zeros[start + lane] = np.int8(best_zero[lane])
