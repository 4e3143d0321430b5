"""Pieces that the compiled kernels share: widening, tiles of groups, lane sums, nibbles.

Scale search works on a tile: `TILE` groups side by side, tile[j, lane] = element j of a group, so
that every loop over lanes vectorizes without reordering any group's sums. An error is summed in
`LANES` partial sums (element j goes to sum j mod LANES), folded in halves; ``search.lane_sum`` does
the same in torch. Unsigned indices keep numba's wraparound test out of the loops; so do slices, which cost some
reference counting each and therefore do not belong where a loop is short.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkquant.numerics.jit import by_width, jit

TILE = 64
LANES = 16
# Adding and subtracting 1.5 * 2**23 rounds |t| < 2**22 half to even.
ROUND = np.float32(12582912.0)
# Adding and subtracting 1.5 * 2**10 rounds |t| < 2**9 to multiples of 2**-13.
SNAP = np.float32(1536.0)
# A smaller scale has no finite reciprocal; its error is taken as that of all-zero codes.
TINY = np.float32(2.0**-120)
EPS = np.float32(2.0**-7)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def _bfloat16_to_float(value: Any) -> Any:
    return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


def _float_to_float(value: Any) -> Any:
    return value


def _bits_to_float(value: Any) -> Any:
    return np.uint32(value).view(np.float32)


def _bfloat16_magnitude(value: Any) -> Any:
    return np.uint16(value & np.uint16(0x7FFF))


def _float_magnitude(value: Any) -> Any:
    return np.uint32(np.float32(value).view(np.uint32) & np.uint32(0x7FFFFFFF))


# An element of `x` (bfloat16 as uint16, or float32) to float32; its magnitude as integer bits; and
# those bits (uint16 or uint32) to float32.
to_float = by_width(_bfloat16_to_float, _float_to_float)
magnitude_bits = by_width(_bfloat16_magnitude, _float_magnitude)
magnitude_float = by_width(_bfloat16_to_float, _bits_to_float)


@jit
def to_bfloat16(value: Any) -> Any:
    """Round a finite float32 to bfloat16, half to even, kept in float32."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    bits = np.uint32(bits + np.uint32(np.uint32(0x7FFF) + odd))
    return np.uint32(bits & np.uint32(0xFFFF0000)).view(np.float32)


@jit
def bfloat16_bits(value: Any) -> Any:
    """The uint16 of a float32 that is exactly a bfloat16."""
    return np.uint16(np.float32(value).view(np.uint32) >> np.uint32(16))


@jit
def widen(row: Any, out: Any) -> None:
    """Copy a row to float32."""
    for k in range(row.size):
        out[k] = to_float(row[k])


@jit
def largest_bits(x: Any, first: Any, size: int) -> Any:
    """The largest magnitude of x[first : first + size] as bits, NaN above infinity. Integer maxima vectorize."""
    most = magnitude_bits(x[first])
    for k in range(size):
        bits = magnitude_bits(x[first + np.uintp(k)])
        most = bits if bits > most else most
    return most


@jit
def largest(row: Any) -> Any:
    """The largest magnitude of a finite row, as float32."""
    return magnitude_float(largest_bits(row, np.uintp(0), row.size))


@jit
def load_tile(groups: Any, start: int, tile: Any) -> None:
    """Transpose groups[start : start + TILE] into tile [size, TILE], zeros past the last group."""
    size = tile.shape[0]
    stop = min(groups.shape[0], start + TILE)
    if stop - start < TILE:
        tile[:] = _ZERO
    whole = size // LANES * LANES
    for lane in range(stop - start):
        row = groups[start + lane]
        for first in range(0, whole, LANES):
            part = row[first : first + LANES]
            out = tile[first : first + LANES]
            for j in range(LANES):
                out[j, lane] = to_float(part[j])
        for j in range(whole, size):
            tile[j, lane] = to_float(row[j])


@jit
def load_importance(importance: Any, start: int, tile: Any) -> None:
    """Fill tile [size, TILE] with the column weights of groups start, start + 1, ... (all rows)."""
    size = tile.shape[0]
    per_row = importance.size // size
    for lane in range(TILE):
        part = importance[(start + lane) % per_row * size :]
        for j in range(size):
            tile[j, lane] = part[j]


@jit
def fold(sums: Any) -> None:
    """Add the LANES partial sums [LANES, TILE] in halves; the total is in sums[0]."""
    half = LANES // 2
    while half:
        for i in range(half):
            low = sums[i]
            high = sums[i + half]
            for lane in range(TILE):
                low[lane] += high[lane]
        half //= 2


@jit
def reciprocals(scale: Any, out: Any) -> None:
    """out = 1 / scale, or 0 where that overflows."""
    for lane in range(TILE):
        out[lane] = _ONE / scale[lane] if abs(scale[lane]) >= TINY else _ZERO


@jit
def pack_nibbles(codes: Any, out: Any, first: Any) -> None:
    """Two codes (uint8 0..15) a byte, the first low, into out[first:]; half as many bytes as codes."""
    pairs = codes.view(np.uint16)
    for k in range(pairs.size):
        pair = np.uint16(pairs[k])
        out[first + np.uintp(k)] = np.uint8(np.uint16(pair | np.uint16(pair >> np.uint16(4))) & np.uint16(0xFF))
