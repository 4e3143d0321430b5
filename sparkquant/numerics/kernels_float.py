"""Compiled kernels of NVFP4 and FP8, one chunk of rows a call, and of the absmax scan.

`x` is a chunk [R, K] of float32, or of bfloat16 seen as uint16. E4M3 tensors are uint8, bfloat16
scales uint16. ``reference`` and ``search`` are the twins that give the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkquant.numerics.jit import jit
from sparkquant.numerics.kernels_tile import (
    EPS,
    LANES,
    TILE,
    TINY,
    bfloat16_bits,
    fold,
    largest,
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
_ONE = np.float32(1.0)
_EXPONENT = np.uint32(0x7F800000)
_ONE_BIT = np.uint32(1)

_E2M1_MAX = np.float32(6.0)
_E2M1_GROUP = 16
_E2M1_ANCHOR = np.float32(2.0**22)  # its last bit is worth 0.5, the smallest E2M1 step
_E2M1_ANCHOR_BITS = _E2M1_ANCHOR.view(np.uint32)

_E4M3_MAX = np.float32(448.0)
_E4M3_NORMAL = np.float32(2.0**-6)
_E4M3_ANCHOR = np.float32(2.0**14)  # its last bit is worth 2**-9, the smallest E4M3 step
_E4M3_ANCHOR_BITS = _E4M3_ANCHOR.view(np.uint32)
_E4M3_EIGHTH = np.uint8(0x20)  # 0.125, what compressed-tensors stores for an all-zero block
_E4M3_LOWEST = 8  # code of 2**-6, the smallest scale that Marlin keeps
_E4M3_HIGHEST = 126  # code of 448

COLUMNS = 128  # partial sums of an FP8 block: one per column, modulo 128


@jit
def e4m3_code(magnitude: Any) -> Any:
    """Round 0 .. 448 (float32) to the E4M3 code, half to even."""
    bits = np.float32(magnitude).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(20)) & _ONE_BIT)
    normal = np.uint32(np.uint32(bits + np.uint32(0x7FFFF) + odd) >> np.uint32(20))
    normal = np.uint32(normal - np.uint32(120 << 3))
    anchored = np.float32(magnitude + _E4M3_ANCHOR).view(np.uint32)
    small = np.uint32(anchored - _E4M3_ANCHOR_BITS)
    return np.uint8(small if magnitude < _E4M3_NORMAL else normal)


@jit
def e4m3_scale(code: Any) -> Any:
    """A normal positive E4M3 code to float32."""
    return np.uint32(np.uint32(np.uint32(code) << np.uint32(20)) + np.uint32(120 << 23)).view(np.float32)


@jit
def e2m1_code(magnitude: Any) -> Any:
    """Round 0 .. 6 (float32) to the index of 0, .5, 1, 1.5, 2, 3, 4, 6, half to even."""
    bits = np.float32(magnitude).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(22)) & _ONE_BIT)
    normal = np.uint32(np.uint32(bits + np.uint32(0x1FFFFF) + odd) >> np.uint32(22))
    normal = np.uint32(normal - np.uint32(252))
    anchored = np.float32(magnitude + _E2M1_ANCHOR).view(np.uint32)
    small = np.uint32(anchored - _E2M1_ANCHOR_BITS)
    return np.uint8(small if magnitude < _ONE else normal)


@jit
def nvfp4_minmax(x: Any, divisor: Any, scale: Any) -> None:
    """E4M3 block scales of largest magnitude / 6, times the global divisor."""
    far = np.empty(scale.shape[1], np.float32)
    for r in range(x.shape[0]):
        groups = x[r].reshape(far.size, _E2M1_GROUP)
        for i in range(far.size):
            far[i] = largest(groups[i])
        out = scale[r]
        for i in range(far.size):
            wanted = divisor * (far[i] / _E2M1_MAX)
            wanted = wanted if wanted > _E4M3_NORMAL else _E4M3_NORMAL
            code = e4m3_code(wanted if wanted < _E4M3_MAX else _E4M3_MAX)
            out[i] = code if far[i] > _ZERO else _E4M3_EIGHTH


@jit
def nvfp4_encode(x: Any, divisor: Any, scale: Any, packed: Any) -> None:
    """Round x / (scale / divisor) to FP4 codes and pack them."""
    buffer = np.empty(x.shape[1], np.float32)
    codes = np.empty(x.shape[1], np.uint8)
    for r in range(x.shape[0]):
        widen(x[r], buffer)
        for i in range(scale.shape[1]):
            step = e4m3_scale(scale[r, i]) / divisor
            values = buffer[i * _E2M1_GROUP : (i + 1) * _E2M1_GROUP]
            out = codes[i * _E2M1_GROUP : (i + 1) * _E2M1_GROUP]
            for j in range(_E2M1_GROUP):
                t = values[j] / step
                sign = np.uint8(8) if t < _ZERO else np.uint8(0)
                t = abs(t)
                out[j] = np.uint8(e2m1_code(t if t < _E2M1_MAX else _E2M1_MAX) | sign)
        pack_nibbles(codes, packed[r], np.uintp(0))


@jit
def nvfp4_errors(tile: Any, weights: Any, step: Any, sums: Any, inverse: Any) -> Any:
    """Weighted squared error of each lane's block with the float32 `step`; a row of `sums`."""
    reciprocals(step, inverse)
    for j in range(_E2M1_GROUP):
        x = tile[j]
        w = weights[j]
        total = sums[j]
        for lane in range(TILE):
            far = abs(x[lane])
            t = far * inverse[lane]
            t = t if t < _E2M1_MAX else _E2M1_MAX
            power = np.uint32(np.float32(t).view(np.uint32) & _EXPONENT).view(np.float32)
            anchor = (power if power > _ONE else _ONE) * _E2M1_ANCHOR
            d = far - ((t + anchor) - anchor) * step[lane]
            total[lane] = w[lane] * (d * d)
    fold(sums)
    return sums[0]


@jit
def nvfp4_search(x: Any, importance: Any, divisor: Any, scale: Any, first: int, last: int) -> None:
    """Improve min-max scales [blocks] among the codes `first` .. `last` away, all normal."""
    groups = x.reshape(scale.size, _E2M1_GROUP)
    tile = np.empty((_E2M1_GROUP, TILE), np.float32)
    weights = np.ones((_E2M1_GROUP, TILE), np.float32)
    sums = np.empty((LANES, TILE), np.float32)
    lanes = np.empty((3, TILE), np.float32)
    step, inverse, least = lanes[0], lanes[1], lanes[2]
    codes = np.full((3, TILE), np.int32(_E4M3_EIGHTH), np.int32)
    start_code, trial, best = codes[0], codes[1], codes[2]
    for start in range(0, scale.size, TILE):
        count = min(TILE, scale.size - start)
        load_tile(groups, start, tile)
        if importance.size:
            load_importance(importance, start, weights)
        for lane in range(count):
            start_code[lane] = scale[start + lane]
        best[:] = start_code
        for lane in range(TILE):
            step[lane] = e4m3_scale(best[lane]) / divisor
        least[:] = nvfp4_errors(tile, weights, step, sums, inverse)
        for away in range(first, last + 1):
            if away == 0:
                continue
            for lane in range(TILE):
                code = np.int32(start_code[lane] + np.int32(away))
                code = code if code > _E4M3_LOWEST else np.int32(_E4M3_LOWEST)
                trial[lane] = code if code < _E4M3_HIGHEST else np.int32(_E4M3_HIGHEST)
                step[lane] = e4m3_scale(trial[lane]) / divisor
            error = nvfp4_errors(tile, weights, step, sums, inverse)
            for lane in range(TILE):
                better = error[lane] < least[lane]
                best[lane] = trial[lane] if better else best[lane]
                least[lane] = error[lane] if better else least[lane]
        for lane in range(count):
            scale[start + lane] = np.uint8(best[lane])


@jit
def fp8_minmax(x: Any, rows: int, columns: int, limit: Any, scale: Any) -> Any:
    """bfloat16 scales of largest magnitude / 448 for blocks of rows x columns; returns the largest as bits."""
    most = np.uint32(0)
    for a in range(scale.shape[0]):
        most = max(most, fp8_minmax_rows(x, rows, columns, limit, scale, a))
    return most


@jit
def fp8_nearest(x: Any, rows: int, columns: int, limit: Any, scale: Any, values: Any) -> Any:
    """`fp8_minmax` and `fp8_encode` while a row of blocks is in a cache."""
    most = np.uint32(0)
    step = np.empty(scale.shape[1], np.float32)
    for a in range(scale.shape[0]):
        most = max(most, fp8_minmax_rows(x, rows, columns, limit, scale, a))
        fp8_encode_rows(x, rows, columns, scale, values, a, step)
    return most


@jit
def fp8_minmax_rows(x: Any, rows: int, columns: int, limit: Any, scale: Any, a: int) -> Any:
    """`fp8_minmax` for row `a` of the blocks."""
    flat = x.ravel()
    most = np.uint32(0)
    for b in range(scale.shape[1]):
        size = min((b + 1) * columns, x.shape[1]) - b * columns
        far = magnitude_bits(flat[a * rows * x.shape[1] + b * columns])
        for r in range(a * rows, min((a + 1) * rows, x.shape[0])):
            bits = largest_bits(flat, np.uintp(r) * np.uintp(x.shape[1]) + np.uintp(b) * np.uintp(columns), size)
            far = bits if bits > far else far
        most = max(most, np.uint32(far))
        value = to_bfloat16(min(magnitude_float(far) / _E4M3_MAX, limit))
        scale[a, b] = bfloat16_bits(value if value >= TINY else EPS)
    return most


@jit
def fp8_encode(x: Any, rows: int, columns: int, scale: Any, values: Any) -> None:
    """Round x / scale to E4M3 codes, saturating."""
    step = np.empty(scale.shape[1], np.float32)
    for a in range(scale.shape[0]):
        fp8_encode_rows(x, rows, columns, scale, values, a, step)


@jit
def fp8_encode_rows(x: Any, rows: int, columns: int, scale: Any, values: Any, a: int, step: Any) -> None:
    """`fp8_encode` for row `a` of the blocks; `step` is room."""
    flat = x.ravel()
    out = values.ravel()
    for b in range(step.size):
        step[b] = to_float(scale[a, b])
    for r in range(a * rows, min((a + 1) * rows, x.shape[0])):
        for b in range(step.size):
            first = np.uintp(r) * np.uintp(x.shape[1]) + np.uintp(b) * np.uintp(columns)
            size = min((b + 1) * columns, x.shape[1]) - b * columns
            # The type of x is known when this is compiled, so that a test of it costs nothing.
            if x.itemsize == 2 and step[b] >= TINY:
                fp8_by_reciprocal(flat, first, size, step[b], out)
            else:
                fp8_by_division(flat, first, size, step[b], out)


@jit
def fp8_code(t: Any) -> Any:
    """Round a float32 to E4M3, saturating."""
    sign = np.uint8(np.uint32(np.float32(t).view(np.uint32) >> np.uint32(24)) & 0x80)
    t = abs(t)
    return np.uint8(e4m3_code(t if t < _E4M3_MAX else _E4M3_MAX) | sign)


@jit
def fp8_by_division(x: Any, first: Any, size: int, step: Any, out: Any) -> None:
    """Codes of x[first : first + size] / step."""
    for k in range(size):
        out[first + np.uintp(k)] = fp8_code(to_float(x[first + np.uintp(k)]) / step)


@jit
def fp8_by_reciprocal(x: Any, first: Any, size: int, step: Any, out: Any) -> None:
    """`fp8_by_division` for bfloat16 x and step, without a division each.

    A quotient of two 8-bit significands is half way between two codes, or more than 2**-14 of itself away from there.
    The product with the reciprocal is wrong by less than 2**-22, so that rounding it to 16 bits restores the halves.
    """
    inverse = _ONE / step
    for k in range(size):
        bits = np.float32(to_float(x[first + np.uintp(k)]) * inverse).view(np.uint32)
        bits = np.uint32(np.uint32(bits + np.uint32(0x80)) & np.uint32(0xFFFFFF00))
        out[first + np.uintp(k)] = fp8_code(bits.view(np.float32))


@jit
def fp8_error(block: Any, importance: Any, scale: Any, sums: Any) -> Any:
    """Weighted squared error of a block [rows, columns] of float32, in COLUMNS partial sums."""
    sums[:] = _ZERO
    inverse = _ONE / scale if scale >= TINY else _ZERO
    for r in range(block.shape[0]):
        for start in range(0, block.shape[1], COLUMNS):
            part = block[r][start : start + COLUMNS]
            weights = importance[start : start + COLUMNS]
            for k in range(part.size):
                far = abs(part[k])
                t = far * inverse
                t = t if t < _E4M3_MAX else _E4M3_MAX
                power = np.uint32(np.float32(t).view(np.uint32) & _EXPONENT).view(np.float32)
                anchor = (power if power > _E4M3_NORMAL else _E4M3_NORMAL) * np.float32(2.0**20)
                d = far - ((t + anchor) - anchor) * scale
                sums[k] += weights[k] * (d * d)
    half = COLUMNS // 2
    while half:
        for k in range(half):
            sums[k] += sums[k + half]
        half //= 2
    return sums[0]


@jit
def fp8_search(x: Any, importance: Any, rows: int, columns: int, limit: Any, factors: Any, scale: Any) -> None:
    """Improve min-max scales; candidates are the min-max scale times each factor."""
    weights = importance if importance.size else np.ones(x.shape[1], np.float32)
    sums = np.empty(COLUMNS, np.float32)
    for a in range(scale.shape[0]):
        chunk = x[a * rows : (a + 1) * rows]
        for b in range(scale.shape[1]):
            part = chunk[:, b * columns : (b + 1) * columns]
            column_weights = weights[b * columns : (b + 1) * columns]
            block = np.empty(part.shape, np.float32)
            for r in range(part.shape[0]):
                widen(part[r], block[r])
            start = to_float(scale[a, b])
            best = start
            least = fp8_error(block, column_weights, best, sums)
            for factor in factors:
                trial = to_bfloat16(min(start * factor, limit))
                error = fp8_error(block, column_weights, trial, sums)
                if error < least:
                    best = trial
                    least = error
            scale[a, b] = bfloat16_bits(best)


@jit
def scan(values: Any, mask: Any, infinity: Any) -> Any:
    """Largest magnitude (as bits) of raw float bits, and the index of the first non-finite or -1."""
    most = np.uint32(0)
    for k in range(values.size):
        bits = np.uint32(np.uint32(values[k]) & mask)
        most = bits if bits > most else most
    if most >= infinity:
        for k in range(values.size):
            if np.uint32(np.uint32(values[k]) & mask) >= infinity:
                return most, k
    return most, -1
