"""Stored bytes in bounded pieces: raw, and as float32 through numpy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sparkquant.checkpoint import Checkpoint, TensorHeader
from sparkquant.errors import CheckpointError
from sparkquant.schemes import DTYPE_BYTES

PIECE_BYTES = 8 * 2**20

Floats = NDArray[np.float32]


def _e4m3_table() -> Floats:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    value[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code >= 128, -value, value).astype(np.float32)


_E4M3 = _e4m3_table()
READABLE = ("BF16", "F16", "F32", "F8_E4M3")


class Payload:
    """Open shards of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Payload:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def raw(self, shard: str, start: int, size: int) -> bytes:
        """Exactly `size` bytes; CheckpointError when the file ends before."""
        path = self._checkpoint.path / shard
        try:
            if shard not in self._files:
                self._files[shard] = path.open("rb", buffering=0)
            data = os.pread(self._files[shard].fileno(), size, start)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}", hint="fetch the shard again") from None
        if len(data) != size:
            raise CheckpointError(f"{path}: ends inside its tensors", hint="fetch the shard again")
        return data

    def codes(self, header: TensorHeader, first: int = 0, last: int | None = None) -> NDArray[Any]:
        """Rows `first:last` of a tensor as unsigned integers of its width, shape [rows, columns]."""
        rows, columns = matrix_shape(header.shape)
        last = rows if last is None else min(last, rows)
        width = DTYPE_BYTES[header.dtype]
        step = columns * width
        data = self.raw(header.shard, header.start + first * step, (last - first) * step)
        return np.frombuffer(data, dtype=f"<u{width}").reshape(last - first, columns)

    def floats(self, header: TensorHeader, first: int = 0, last: int | None = None) -> Floats:
        """Rows of a float tensor as float32."""
        return decode(self.codes(header, first, last), header.dtype)

    def pieces(self, header: TensorHeader) -> Iterator[NDArray[Any]]:
        """A whole tensor, some rows (or part of one long row) at a time, as unsigned integers."""
        width = DTYPE_BYTES[header.dtype]
        for start in range(header.start, header.end, PIECE_BYTES):
            size = min(PIECE_BYTES, header.end - start)
            yield np.frombuffer(self.raw(header.shard, start, size), dtype=f"<u{width}")


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns: everything behind the first dimension is a row."""
    rows = shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return rows, columns


def decode(codes: NDArray[Any], dtype: str) -> Floats:
    """Unsigned integers of the dtype's width to float32."""
    if dtype == "BF16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return codes.view(np.float16).astype(np.float32)
    if dtype == "F8_E4M3":
        values: Floats = _E4M3[codes]
        return values
    if dtype == "F32":
        return codes.view(np.float32)
    raise ValueError(f"{dtype} is no float type that is checked")
