"""Open shards of a checkpoint, read by positioned reads: a shard that shrinks under us is an error, not a crash."""

from __future__ import annotations

import os
import threading
from typing import BinaryIO, Self

from sparkquant.checkpoint import Checkpoint, TensorHeader
from sparkquant.errors import CheckpointError


class ShardFiles:
    """Files of one checkpoint, each opened once; any number of threads may read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.path
        self._files: dict[str, BinaryIO] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what was opened."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def file(self, shard: str) -> BinaryIO:
        """The open file of a shard."""
        path = self._folder / shard
        with self._opening:
            if shard not in self._files:
                try:
                    self._files[shard] = path.open("rb", buffering=0)
                except OSError as error:
                    raise CheckpointError(f"{path}: {error.strerror}", hint="fetch the shard again") from None
            return self._files[shard]

    def fill(self, header: TensorHeader, offset: int, view: memoryview) -> None:
        """Read the tensor's bytes from `offset` on until `view` (of bytes) is full."""
        descriptor = self.file(header.shard).fileno()
        start = header.start + offset
        while view:
            count = os.preadv(descriptor, [view[: 2**30]], start)
            if count == 0:
                raise CheckpointError(
                    f"{self._folder / header.shard}: ends inside {header.name}", hint="fetch the shard again"
                )
            view, start = view[count:], start + count
