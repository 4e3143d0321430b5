"""Every stored byte once, in the order of the files: one thread reads ahead while the last piece is looked at."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkquant.checkpoint import Checkpoint, TensorHeader
from sparkquant.errors import CheckpointError
from sparkquant.schemes import DTYPE_BYTES
from sparkquant.verification.payload import PIECE_BYTES

CACHED_ELEMENTS = 128 * 1024
"""Values that are looked at together: they and what is made of them stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of one shard that are read at once; `parts` are (tensor, offset in the piece, size)."""

    shard: str
    start: int
    parts: list[tuple[TensorHeader, int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.parts[-1][1] + self.parts[-1][2] if self.parts else 0


def stream(checkpoint: Checkpoint) -> Iterator[tuple[TensorHeader, NDArray[Any]]]:
    """Parts of all tensors as unsigned integers of their width. A part is gone when the next one is asked for."""
    buffers = (bytearray(PIECE_BYTES), bytearray(PIECE_BYTES))
    pieces = _pieces(checkpoint)
    reader = _Reader(checkpoint)
    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = [(piece, pool.submit(reader.read, piece, buffers[0])) for piece in (*_next(pieces),)]
            turn = 0
            while waiting:
                piece, done = waiting.pop()
                done.result()
                waiting = [(other, pool.submit(reader.read, other, buffers[1 - turn])) for other in (*_next(pieces),)]
                for header, offset, size in piece.parts:
                    width = DTYPE_BYTES[header.dtype]
                    yield header, np.frombuffer(buffers[turn], f"<u{width}", size // width, offset)
                turn = 1 - turn
        finally:
            pool.shutdown(cancel_futures=True)
            reader.close()


def _next(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """The next piece, if there is one."""
    for piece in pieces:
        yield piece
        return


def _pieces(checkpoint: Checkpoint) -> Iterator[_Piece]:
    """Tensors cut where a piece is full, at a whole number of elements."""
    by_shard: dict[str, list[TensorHeader]] = defaultdict(list)
    for header in checkpoint.tensors.values():
        if header.bytes:
            by_shard[header.shard].append(header)
    for shard, headers in sorted(by_shard.items()):
        piece = _Piece(shard, 0)
        for header in sorted(headers, key=lambda header: header.start):
            at = header.start
            while at < header.end:
                if piece.parts and at != piece.start + piece.size:
                    yield piece
                    piece = _Piece(shard, at)
                elif not piece.parts:
                    piece = _Piece(shard, at)
                free = (PIECE_BYTES - piece.size) // 8 * 8
                size = min(free, header.end - at)
                if size:
                    piece.parts.append((header, at - piece.start, size))
                    at += size
                if free < 8 or at < header.end:
                    yield piece
                    piece = _Piece(shard, at)
        if piece.parts:
            yield piece


class _Reader:
    """One open shard at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._shard, self._file = "", -1

    def read(self, piece: _Piece, buffer: bytearray) -> None:
        """Fill the buffer's front; CheckpointError when the file ends before."""
        path = self._checkpoint.path / piece.shard
        try:
            if piece.shard != self._shard:
                self.close()
                self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._shard = piece.shard
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            view = memoryview(buffer)[: piece.size]
            at = piece.start
            while view and (count := os.preadv(self._file, [view], at)):
                view, at = view[count:], at + count
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}", hint="fetch the shard again") from None
        if view:
            raise CheckpointError(f"{path}: ends inside its tensors", hint="fetch the shard again")

    def close(self) -> None:
        """Close the open shard."""
        if self._file >= 0:
            os.close(self._file)
        self._shard, self._file = "", -1


_EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000, "F8_E5M2": 0x7C}


def holds_nonfinite(codes: NDArray[Any], dtype: str) -> bool:
    """Whether there is a NaN or an infinite value; never for integer types."""
    if dtype == "F8_E4M3":
        sign, least = 0x7F, 0x7F
    elif dtype in _EXPONENTS:
        sign, least = (1 << (8 * codes.dtype.itemsize - 1)) - 1, _EXPONENTS[dtype]
    else:
        return False
    scratch = np.empty(min(len(codes), CACHED_ELEMENTS), codes.dtype)
    mask = codes.dtype.type(sign)
    for start in range(0, len(codes), CACHED_ELEMENTS):
        some = codes[start : start + CACHED_ELEMENTS]
        size = np.bitwise_and(some, mask, out=scratch[: len(some)])
        if size.max() >= least:
            return True
    return False
