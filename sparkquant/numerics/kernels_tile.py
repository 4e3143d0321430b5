"""Pieces that the compiled kernels share: widening, tiles of groups, lane sums, nibbles.

Scale search works on a tile: `TILE` groups side by side, tile[j, lane] = element j of a group, so
that every loop over lanes vectorizes without reordering any group's sums. An error is summed in
`LANES` partial sums (element j goes to sum j mod LANES), folded in halves; ``search.lane_sum`` does
the same in torch. Slices, not computed indices, keep numba's wraparound test out of the loops.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkquant.numerics.jit import jit

TILE = 64
LANES = 16
# Adding and subtracting 1.5 * 2**23 rounds |t| < 2**22 half to even.
ROUND = np.float32(12582912.0)
# A smaller scale has no finite reciprocal; its error is taken as that of all-zero codes.
TINY = np.float32(2.0**-120)
EPS = np.float32(2.0**-7)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@jit
def from_bfloat16(bits: Any) -> Any:
    """bfloat16 bits (uint16) to float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


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
    """Copy a row to float32; a 16-bit row is bfloat16 bits."""
    if row.itemsize == 2:
        for k in range(row.size):
            out[k] = from_bfloat16(row[k])
    else:
        for k in range(row.size):
            out[k] = row[k]


@jit
def largest(row: Any) -> Any:
    """The largest magnitude of a finite row, as float32. Integer maxima vectorize."""
    if row.itemsize == 2:
        narrow = np.uint16(0)
        for k in range(row.size):
            bits = np.uint16(np.uint16(row[k]) & np.uint16(0x7FFF))
            narrow = bits if bits > narrow else narrow
        return from_bfloat16(narrow)
    wide = np.uint32(0)
    for k in range(row.size):
        bits32 = np.uint32(np.float32(row[k]).view(np.uint32) & np.uint32(0x7FFFFFFF))
        wide = bits32 if bits32 > wide else wide
    return np.uint32(wide).view(np.float32)


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
            if part.itemsize == 2:
                for j in range(LANES):
                    out[j, lane] = from_bfloat16(part[j])
            else:
                for j in range(LANES):
                    out[j, lane] = part[j]
        for j in range(whole, size):
            tile[j, lane] = from_bfloat16(row[j]) if row.itemsize == 2 else np.float32(row[j])


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
def pack_nibbles(codes: Any, out: Any) -> None:
    """Two codes (uint8 0..15) a byte, the first low; `codes` has twice the size of `out`."""
    pairs = codes.view(np.uint16)
    for k in range(out.size):
        pair = np.uint16(pairs[k])
        out[k] = np.uint8(np.uint16(pair | np.uint16(pair >> np.uint16(4))) & np.uint16(0xFF))
