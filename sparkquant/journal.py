"""The journal of a job: what it is, and which shards are finished. Lines are only added, under an exclusive lock."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from sparkquant.errors import UsageError
from sparkquant.lock_holder import lock_holder


class Journal:
    """One open, locked journal.

    job   what the journal belongs to; None when it is new
    done  digest of every shard that was finished, by name
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _locked(path)
        text = self._file.readall()
        self.job, self.done = _entries(text)
        self._torn = bool(text) and not text.endswith(b"\n")

    def start(self, job: Mapping[str, Any]) -> None:
        """Forget everything; the next lines are about `job`."""
        self._file.truncate(0)
        self._torn = False
        self.add({"job": job})
        self.job, self.done = job, {}

    def finish(self, shard: str, digest: str) -> None:
        """A shard is complete and durable."""
        self.add({"shard": shard, "digest": digest})
        self.done[shard] = digest

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add a line; it is durable when this returns."""
        text = json.dumps(entry).encode() + b"\n"
        view = memoryview(b"\n" + text if self._torn else text)
        self._torn = True
        while view:
            view = view[self._file.write(view) :]
        os.fsync(self._file.fileno())
        self._torn = False

    def close(self) -> None:
        """Let go of the lock; an empty journal is removed."""
        if os.fstat(self._file.fileno()).st_size == 0:
            self.path.unlink(missing_ok=True)
        self._file.close()


def _locked(path: Path) -> FileIO:
    while True:
        file = FileIO(path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock_holder(file.fileno())
            file.close()
            raise UsageError(
                f"{path} is in use by {holder}", hint="wait for it, or choose another output folder"
            ) from None
        except OSError as error:
            file.close()
            raise UsageError(
                f"{path} cannot be locked: {error.strerror}", hint="choose an output folder on another file system"
            ) from None
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            file.seek(0)
            return file
        # Its owner published and removed it between our open and our lock.
        file.close()


def _entries(text: bytes) -> tuple[Any, dict[str, str]]:
    """Job and finished shards; lines that a kill tore are skipped."""
    job: Any = None
    done: dict[str, str] = {}
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict):
            continue
        job = entry.get("job", job)
        shard, digest = entry.get("shard"), entry.get("digest")
        if isinstance(shard, str) and isinstance(digest, str) and Path(shard).name == shard:
            done[shard] = digest
    return job, done
