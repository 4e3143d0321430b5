"""One shard file of the result: the safetensors library's own layout, filled in any order, checked against the plan."""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sparkquant.errors import CheckpointError, PlanViolation, Resumable
from sparkquant.schemes import OutputTensor

_ALIGNMENT_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16", "I32", "U32", "F32",
    "C64", "F64", "I64", "U64",
)  # fmt: skip
"""The safetensors library lays tensors out in this order, last first: wide types before narrow ones stay aligned."""

_COPY_BYTES = 64 * 2**20


def shard_layout(tensors: Sequence[OutputTensor]) -> tuple[bytes, dict[str, int]]:
    """Header bytes of a safetensors file and every tensor's absolute offset, ordered as the library does."""
    ordered = sorted(tensors, key=lambda t: (-_ALIGNMENT_ORDER.index(t.dtype), t.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in ordered:
        if tensor.name in header:
            raise PlanViolation(f"{tensor.name} is planned twice", hint="report this with the plan's JSON")
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.bytes],
        }
        position += tensor.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    offsets = {name: base + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
    return struct.pack("<Q", len(text)) + text, offsets


class ShardWriter:
    """One shard file of known layout; tensors may arrive in any order, each exactly once, and pieces on any thread."""

    def __init__(self, path: Path, tensors: Sequence[OutputTensor]) -> None:
        self._path = path
        self._planned = {tensor.name: tensor for tensor in tensors}
        header, self._offsets = shard_layout(tensors)
        self._unclaimed = set(self._planned)
        self._missing = {tensor.name: tensor.bytes for tensor in tensors}
        self._counting = threading.Lock()
        self._unflushed = 0
        with disk_full(path):
            self._file: BinaryIO = path.open("wb")
        try:
            with disk_full(path):
                _pwrite(self._file.fileno(), header, 0)
                self._file.truncate(len(header) + sum(tensor.bytes for tensor in tensors))
        except BaseException:
            self.abandon()
            raise

    def put(self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Store one tensor; PlanViolation when it is not exactly what the plan says."""
        self._claim(name, dtype, shape, data.nbytes)
        self._write(name, 0, data)

    def room(self, name: str, dtype: str, shape: tuple[int, ...]) -> Room:
        """Claim one tensor, to be written in pieces; PlanViolation when it is not exactly what the plan says."""
        size = OutputTensor(name, dtype, shape).bytes
        self._claim(name, dtype, shape, size)
        return Room(name, size, self._write)

    def _write(self, name: str, offset: int, data: memoryview) -> None:
        with disk_full(self._path):
            _pwrite(self._file.fileno(), data, self._offsets[name] + offset)
        self._arrived(name, data.nbytes)

    def _arrived(self, name: str, size: int) -> None:
        with self._counting:
            self._missing[name] -= size
            self._unflushed += size

    def copy(self, name: str, dtype: str, shape: tuple[int, ...], source: BinaryIO, start: int, size: int) -> None:
        """Copy a tensor's bytes from an open file without looking at them."""
        self._claim(name, dtype, shape, size)
        try:
            with disk_full(self._path):
                _copy_range(source.fileno(), start, self._file.fileno(), self._offsets[name], size)
        except EOFError:
            raise CheckpointError(f"{source.name}: ends inside {name}", hint="fetch the shard again") from None
        self._arrived(name, size)

    def _claim(self, name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        planned = self._planned.get(name)
        given = OutputTensor(name, dtype, tuple(shape))
        if planned is None or name not in self._unclaimed:
            what = "was stored already" if planned else "is not in the plan of this shard"
            raise PlanViolation(f"{name} {what}", hint="this is a bug: report it with the plan's JSON")
        if given != planned or size != planned.bytes:
            raise PlanViolation(
                f"{name}: {dtype} {list(shape)}, {size} bytes; the plan says {planned.dtype} {list(planned.shape)},"
                f" {planned.bytes} bytes",
                hint="this is a bug: report it with the plan's JSON",
            )
        self._unclaimed.discard(name)

    def flush_beyond(self, limit_bytes: int) -> None:
        """Force written bytes to disk once more than `limit_bytes` wait: the final fsync then has little left to do."""
        with self._counting:
            waiting = self._unflushed
            self._unflushed = 0 if waiting > limit_bytes else waiting
        if waiting > limit_bytes:
            with disk_full(self._path):
                os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """All tensors must have arrived; then the bytes are forced to disk."""
        try:
            missing = sorted(self._unclaimed | {name for name, size in self._missing.items() if size})
            if missing:
                raise PlanViolation(
                    f"{len(missing)} planned tensors never arrived, for instance {', '.join(missing[:3])}",
                    hint="this is a bug: report it with the plan's JSON",
                )
            with disk_full(self._path):
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close after a failure; the journal does not know this shard, so a resume writes it anew."""
        self._file.close()


class Room:
    """The place of one claimed tensor in a shard file. All its bytes must arrive, in any order and on any thread."""

    def __init__(self, name: str, size: int, write: Callable[[str, int, memoryview], None]) -> None:
        self._name, self._size, self._write = name, size, write

    def write(self, offset: int, data: memoryview) -> None:
        """Store bytes from `offset` of the tensor on; PlanViolation when they do not lie in it."""
        if offset < 0 or offset + data.nbytes > self._size:
            raise PlanViolation(
                f"{self._name}: {data.nbytes} bytes at {offset} are more than its {self._size}",
                hint="this is a bug: report it with the plan's JSON",
            )
        self._write(self._name, offset, data)


def _pwrite(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view[: 2**30], offset)
        view, offset = view[written:], offset + written


def _copy_range(source: int, start: int, target: int, offset: int, size: int) -> None:
    """Copy inside the kernel where the file systems allow it, through a small buffer elsewhere."""
    while size:
        try:
            count = os.copy_file_range(source, target, min(size, _COPY_BYTES), start, offset)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            count = 0
        if count == 0:
            data = os.pread(source, min(size, _COPY_BYTES), start)
            count = len(data)
            _pwrite(target, data, offset)
        if count == 0:
            raise EOFError
        start, offset, size = start + count, offset + count, size - count


@contextmanager
def disk_full(path: Path) -> Iterator[None]:
    """Around what writes `path`: a full or broken disk becomes an error that says how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        raise Resumable(
            f"{path}: {error.strerror}", hint="free some space, then run the same command: it goes on where it stopped"
        ) from None
