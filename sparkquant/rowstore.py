"""States of all calibration rows at one place of the model, in files of the private work folder.

Files are read and written batch by batch: they cost the memory of one batch, and are what an interrupted run starts
from again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class RowFile:
    """One file of [B, L, width] per batch, in a floating dtype. `shapes` are (B, L)."""

    def __init__(self, path: Path, shapes: Sequence[tuple[int, int]], width: int, dtype: torch.dtype) -> None:
        self._shapes = [(*shape, width) for shape in shapes]
        self._dtype = dtype
        self._starts = [0]
        for shape in self._shapes:
            self._starts.append(self._starts[-1] + math.prod(shape) * dtype.itemsize)
        self._path = path
        path.touch(mode=0o600)

    def read(self, batch: int) -> Tensor:
        """The states of a batch, in memory of their own."""
        size = self._starts[batch + 1] - self._starts[batch]
        raw = np.fromfile(self._path, dtype=np.uint8, count=size, offset=self._starts[batch])
        return torch.from_numpy(raw).view(self._dtype).view(self._shapes[batch])

    def write(self, batch: int, states: Tensor) -> None:
        """Store the states of a batch."""
        raw = states.detach().to("cpu", self._dtype).contiguous().view(torch.uint8)
        with self._path.open("r+b") as file:
            file.seek(self._starts[batch])
            file.write(raw.numpy().data)

    def sync(self) -> None:
        """Wait until the file is on the disk."""
        with self._path.open("rb") as file:
            os.fsync(file.fileno())


class RowStore:
    """States in front of a block, per batch and stream. Generation g + 1 is written while g is read.

    The stream `quantized` runs through the blocks as they will be stored, `full` (if any) through the source's.
    """

    def __init__(
        self, folder: Path, shapes: Sequence[tuple[int, int]], width: int, dtype: torch.dtype, streams: Sequence[str]
    ) -> None:
        self._streams = streams
        self._files = {
            (g, name): RowFile(folder / f"rows-{g}-{name}.bin", shapes, width, dtype)
            for g in (0, 1)
            for name in streams
        }

    def read(self, generation: int, stream: str, batch: int) -> Tensor:
        """States of one batch."""
        return self._files[generation % 2, stream].read(batch)

    def write(self, generation: int, stream: str, batch: int, states: Tensor) -> None:
        """Store states of one batch."""
        self._files[generation % 2, stream].write(batch, states)

    def sync(self, generation: int) -> None:
        """Make a generation durable: the state that names it comes after."""
        for stream in self._streams:
            self._files[generation % 2, stream].sync()
