"""The one writer: stage everything beside the target, check it, rename it. Kill it anywhere and no half folder is left.

    OUT.partial/   shards at their final layout, one fsync and one journal line each; index, config and side files last
    OUT            appears by a single rename, complete and verified

A second run of the same job reads the journal, re-hashes the finished shards and goes on; a different job is refused
with the old and the new identity.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import xxhash

from sparkquant.checkpoint import INDEX
from sparkquant.errors import PlanViolation, Problem, Resumable, UsageError
from sparkquant.schemes import OutputTensor

JOURNAL = "journal.jsonl"
MARGIN_BYTES = 64 * 2**20
"""Free space demanded beyond the payload, for headers, side files and what other processes write meanwhile."""

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
    """One shard file of known layout; tensors may arrive in any order, each exactly once."""

    def __init__(self, path: Path, tensors: Sequence[OutputTensor]) -> None:
        self._planned = {tensor.name: tensor for tensor in tensors}
        header, self._offsets = shard_layout(tensors)
        self._missing = set(self._planned)
        self._unflushed = 0
        self._file: BinaryIO = path.open("wb")
        with _disk_full(path):
            _pwrite(self._file.fileno(), header, 0)
            self._file.truncate(len(header) + sum(tensor.bytes for tensor in tensors))

    def put(self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Store one tensor; PlanViolation when it is not exactly what the plan says."""
        self._claim(name, dtype, shape, data.nbytes)
        with _disk_full(Path(self._file.name)):
            _pwrite(self._file.fileno(), data, self._offsets[name])

    def copy(self, name: str, dtype: str, shape: tuple[int, ...], source: BinaryIO, start: int, size: int) -> None:
        """Copy a tensor's bytes from an open file without looking at them."""
        self._claim(name, dtype, shape, size)
        with _disk_full(Path(self._file.name)):
            _copy_range(source.fileno(), start, self._file.fileno(), self._offsets[name], size)

    def _claim(self, name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        planned = self._planned.get(name)
        given = OutputTensor(name, dtype, tuple(shape))
        if planned is None or name not in self._missing:
            what = "was stored already" if planned else "is not in the plan of this shard"
            raise PlanViolation(f"{name} {what}", hint="this is a bug: report it with the plan's JSON")
        if given != planned or size != planned.bytes:
            raise PlanViolation(
                f"{name}: {dtype} {list(shape)}, {size} bytes; the plan says {planned.dtype} {list(planned.shape)},"
                f" {planned.bytes} bytes",
                hint="this is a bug: report it with the plan's JSON",
            )
        self._missing.discard(name)
        self._unflushed += size

    def flush_beyond(self, limit_bytes: int) -> None:
        """Force written bytes to disk once more than `limit_bytes` wait: the final fsync then has little left to do."""
        if self._unflushed > limit_bytes:
            with _disk_full(Path(self._file.name)):
                os.fdatasync(self._file.fileno())
            self._unflushed = 0

    def close(self) -> None:
        """All tensors must have arrived; then the bytes are forced to disk."""
        try:
            if self._missing:
                lost = ", ".join(sorted(self._missing)[:3])
                raise PlanViolation(
                    f"{len(self._missing)} planned tensors never arrived, for instance {lost}",
                    hint="this is a bug: report it with the plan's JSON",
                )
            with _disk_full(Path(self._file.name)):
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close after a failure; the journal does not know this shard, so a resume writes it anew."""
        self._file.close()


class StagedCheckpoint:
    """`OUT.partial` under an exclusive lock. Use as a context manager; `publish` ends it."""

    def __init__(self, out: Path, job: Mapping[str, Any], *, restart: bool = False) -> None:
        self.out = out
        self.path = out.with_name(out.name + ".partial")
        self._job = json.loads(json.dumps(job))
        self._restart = restart
        self._done: dict[str, str] = {}
        self._lock: BinaryIO | None = None

    @property
    def finished(self) -> frozenset[str]:
        """Names of the shards that an earlier run completed and that are still intact."""
        return frozenset(self._done)

    def __enter__(self) -> StagedCheckpoint:
        _refuse_existing(self.out)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise UsageError(f"{self.path}: {error.strerror}", hint="choose another output folder") from None
        self._lock = (self.path / ".lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UsageError(
                f"{self.path} is in use by another process", hint="wait for it, or choose another output folder"
            ) from None
        try:
            self._take_up()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()

    def _take_up(self) -> None:
        journal = self.path / JOURNAL
        lines = [] if self._restart else _journal_lines(journal)
        if lines and lines[0].get("job") != self._job:
            raise UsageError(
                f"{self.path} belongs to another job",
                hint="pass --restart to discard it, choose another output folder, or repeat the old command",
                problems=list(_differences(lines[0].get("job"), self._job)),
            )
        self._done = {}
        for line in lines[1:]:
            shard, digest = line.get("shard"), line.get("digest")
            if isinstance(shard, str) and Path(shard).name == shard and _digest(self.path / shard) == digest:
                self._done[shard] = str(digest)
        _clear(self.path, keep={".lock", *self._done})
        with journal.open("w", encoding="utf-8") as file:
            for entry in ({"job": self._job}, *({"shard": s, "digest": d} for s, d in self._done.items())):
                file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def require_space(self, needed_bytes: int) -> None:
        """Refuse before the first byte when the disk cannot take the result."""
        free, needed = shutil.disk_usage(self.path).free, needed_bytes + MARGIN_BYTES
        if free < needed:
            raise Resumable(
                f"{self.path.parent}: {free:,} bytes free, {needed:,} needed",
                hint=f"free {needed - free:,} bytes or choose another disk, then run the same command",
            )

    @contextmanager
    def shard(self, name: str, tensors: Sequence[OutputTensor]) -> Iterator[ShardWriter]:
        """Write one shard: on success it is durable and in the journal, on failure it does not count."""
        writer = ShardWriter(self.path / name, tensors)
        try:
            yield writer
        except BaseException:
            writer.abandon()
            raise
        writer.close()
        digest = _digest(self.path / name)
        with _disk_full(self.path), (self.path / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"shard": name, "digest": digest}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._done[name] = str(digest)

    def write_index(self, shards: Mapping[str, Sequence[OutputTensor]]) -> None:
        """The index of a result of several shards; a single shard needs none."""
        if len(shards) == 1:
            return
        total = sum(tensor.bytes for tensors in shards.values() for tensor in tensors)
        places = {tensor.name: shard for shard, tensors in shards.items() for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        self.write_text(INDEX, json.dumps(index, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """A small file, durable when this returns."""
        path = self.path / name
        with _disk_full(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())

    def copy_file(self, name: str, source: Path) -> None:
        """A side file, byte for byte."""
        path = self.path / name
        with _disk_full(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)

    def publish(self) -> Path:
        """Rename to the final name. After this the folder is complete; before it there is no folder."""
        _refuse_existing(self.out)
        for name in (JOURNAL, ".lock"):
            (self.path / name).unlink(missing_ok=True)
        for folder, _, _ in os.walk(self.path):
            _sync_folder(Path(folder))
        self.path.rename(self.out)
        _sync_folder(self.out.parent)
        return self.out


def _refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists already", hint="choose a new folder, or remove this one yourself")


def _journal_lines(journal: Path) -> list[dict[str, Any]]:
    """Whole lines only: a kill may have cut the last one."""
    try:
        text = journal.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return []
    lines: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not isinstance(entry, dict):
            break
        lines.append(entry)
    return lines


def _differences(old: Any, new: Mapping[str, Any]) -> Iterator[Problem]:
    before = old if isinstance(old, Mapping) else {}
    for key in sorted({*before, *new}):
        if before.get(key) != new.get(key):
            yield Problem(key, f"was {_brief(before.get(key))}, is {_brief(new.get(key))}")


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 70 else text[:67] + "..."


def _clear(folder: Path, *, keep: set[str]) -> None:
    for entry in folder.iterdir():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _digest(path: Path) -> str | None:
    """xxh3-128 of a file: it guards against torn writes, not against forgers, and must not cost more than the write."""
    try:
        hasher = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(8 * 2**20))
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
        return hasher.hexdigest()
    except OSError:
        return None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
            data = os.pread(source, min(size, _COPY_BYTES), start)
            count = len(data)
            _pwrite(target, data, offset)
        if count == 0:
            raise OSError(errno.EIO, "the source file ended early")
        start, offset, size = start + count, offset + count, size - count


@contextmanager
def _disk_full(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        raise Resumable(
            f"{path}: {error.strerror}", hint="free some space, then run the same command: it goes on where it stopped"
        ) from None
