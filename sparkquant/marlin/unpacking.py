"""The beginning of a compressed entry of a fat binary: Zstandard by the system's library, LZ4 in Python."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from typing import Any

LZ4, ZSTD = 1 << 13, 1 << 15
"""Bits of an entry's flags; neither: the payload is as it is."""


class _Buffer(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("at", ctypes.c_size_t))


@functools.cache
def _library() -> Any:
    """libzstd, None where it is not installed."""
    name = ctypes.util.find_library("zstd") or "libzstd.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    library.ZSTD_createDStream.restype = ctypes.c_void_p
    library.ZSTD_decompressStream.restype = ctypes.c_size_t
    return library


def beginning(data: bytes, flags: int, limit: int) -> bytes | None:
    """At most `limit` bytes of what `data`, the first part of a payload, stands for; None without a decompressor."""
    if flags & ZSTD:
        return None if _library() is None else _zstd(data, limit)
    return _lz4(data, limit) if flags & LZ4 else data[:limit]


def _zstd(data: bytes, limit: int) -> bytes:
    library = _library()
    source, target = ctypes.create_string_buffer(data, len(data)), ctypes.create_string_buffer(limit)
    given = _Buffer(ctypes.addressof(source), len(data), 0)
    made = _Buffer(ctypes.addressof(target), limit, 0)
    stream = ctypes.c_void_p(library.ZSTD_createDStream())
    try:
        while made.at < limit and given.at < given.size:
            left = library.ZSTD_decompressStream(stream, ctypes.byref(made), ctypes.byref(given))
            if left == 0 or library.ZSTD_isError(ctypes.c_size_t(left)):
                break
    finally:
        library.ZSTD_freeDStream(stream)
    return target.raw[: made.at]


def _lz4(data: bytes, limit: int) -> bytes:
    """One block of the LZ4 format, as far as it goes. Source: lz4_Block_format.md."""
    out, at = bytearray(), 0
    try:
        while at < len(data) and len(out) < limit:
            token, at = data[at], at + 1
            count, at = _length(data, at, token >> 4)
            out += data[at : at + count]
            at += count
            if at + 2 > len(data):
                break
            back, at = int.from_bytes(data[at : at + 2], "little"), at + 2
            count, at = _length(data, at, token & 15)
            if not 0 < back <= len(out):
                break  # damaged
            start = len(out) - back
            for i in range(min(count + 4, limit)):
                out.append(out[start + i])
    except IndexError:
        pass  # the part that was read ends here
    return bytes(out[:limit])


def _length(data: bytes, at: int, count: int) -> tuple[int, int]:
    if count == 15:
        while True:
            more, at = data[at], at + 1
            count += more
            if more != 255:
                break
    return count, at
