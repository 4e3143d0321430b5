"""The one writer: stage everything beside the target, check it, rename it. Kill it anywhere and no half folder is left.

    OUT.partial/          shards at their final layout, one fsync each; index, config and side files last
    OUT.partial.journal   the job and one line per finished shard; whoever works on the folder holds its lock.
                          It lies beside the folder, which holds the result alone
    OUT                   appears by a single rename, complete and verified

A second run of the same job reads the journal, re-hashes the finished shards and goes on; a different job is refused
with the old and the new identity.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from sparkquant.checkpoint import INDEX
from sparkquant.errors import Problem, Resumable, UsageError
from sparkquant.footprint import MARGIN_BYTES
from sparkquant.journal import Journal
from sparkquant.schemes import OutputTensor
from sparkquant.shard_writer import ShardWriter, disk_full

"""Free space demanded beyond the payload, for headers, side files and what other processes write meanwhile."""

_HASHED_BYTES = 2**20


class StagedCheckpoint:
    """`OUT.partial` under an exclusive lock. Use as a context manager; `publish` ends it."""

    def __init__(self, out: Path, job: Mapping[str, Any], *, restart: bool = False) -> None:
        self.out = out
        self.path = out.with_name(out.name + ".partial")
        self._job = json.loads(json.dumps(job))
        self._restart = restart
        self.discarded: Any = None
        """The job whose unfinished work `restart` throws away."""
        self._done: set[str] = set()
        self._fresh = False
        self._journal: Journal

    @property
    def finished(self) -> frozenset[str]:
        """Names of the shards that an earlier run completed and that are still intact."""
        return frozenset(self._done)

    @property
    def digests(self) -> dict[str, str]:
        """xxh3-128 of every finished shard, as the journal holds it."""
        return {shard: self._journal.done[shard] for shard in self._done}

    def __enter__(self) -> StagedCheckpoint:
        with _usable(self.out):
            _refuse_existing(self.out)
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._journal = Journal(self.path.with_name(self.path.name + ".journal"))
        try:
            # Whoever held the lock until now may have published.
            _refuse_existing(self.out)
            with _usable(self.path):
                self._take_up()
        except BaseException:
            self._journal.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()

    def _take_up(self) -> None:
        if self.path.is_symlink():
            raise UsageError(f"{self.path} is a link", hint="remove it yourself, or choose another output folder")
        old = self._journal.job
        left = self.path.exists() and any(self.path.iterdir())
        self._fresh = not left and old is None
        if left and old is None:
            raise UsageError(
                f"{self.path} exists, and no journal beside it says that it is ours",
                hint="remove it yourself, or choose another output folder",
            )
        # Calibration works in a private folder long before it writes a shard here.
        begun = left or (isinstance(old, dict) and "calibration" in old)
        self.discarded = old if begun and old != self._job else None
        if self.discarded is not None and not self._restart:
            raise UsageError(
                f"{self.path} belongs to another job",
                hint="pass --restart to discard it, choose another output folder, or repeat the old command",
                problems=list(_differences(old, self._job)),
            )
        self.path.mkdir(exist_ok=True)
        if left and not self._restart:
            done = self._journal.done
            self._done = {shard for shard in done if _digest(self.path / shard) == done[shard]}
        _clear(self.path, keep=self._done)
        if not left or self._restart:
            self._journal.start(self._job)

    def require_space(self, needed_bytes: int) -> None:
        """Refuse before the first byte when the disk cannot take the result."""
        free, needed = shutil.disk_usage(self.path).free, needed_bytes + MARGIN_BYTES
        if free < needed:
            if self._fresh:  # nothing was begun, so nothing stays behind
                self.path.rmdir()
                self._journal.path.unlink(missing_ok=True)
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
        with ThreadPoolExecutor(1) as beside:  # the disk works while the bytes are hashed
            digest = beside.submit(_digest, self.path / name)
            writer.close()
        with disk_full(self.path):
            self._journal.finish(name, str(digest.result()))
        self._done.add(name)

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
        with disk_full(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())

    def copy_file(self, name: str, source: Path) -> None:
        """A side file, byte for byte, durable when this returns."""
        path = self.path / name
        with disk_full(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
            _sync(path)

    def publish(self) -> Path:
        """Rename to the final name. After this the folder is complete; before it there is no folder."""
        _refuse_existing(self.out)
        for folder, _, _ in os.walk(self.path):
            _sync(Path(folder))
        self.path.rename(self.out)
        _sync(self.out.parent)
        self._journal.path.unlink(missing_ok=True)
        return self.out


def _refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists already", hint="choose a new folder, or remove this one yourself")


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
            buffer = memoryview(bytearray(_HASHED_BYTES))
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
        return hasher.hexdigest()
    except OSError:
        return None


def _sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """A place that cannot be written is the caller's to choose; a full disk is not."""
    try:
        with disk_full(path):
            yield
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="choose another output folder") from None
