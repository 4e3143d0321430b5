"""Hidden states of all calibration rows between two blocks, in files of the private work folder.

The stream `quantized` runs through the blocks as they will be stored, `full` (if any) through the source's. Mapped
files cost no memory that the kernel could not take back, and are what an interrupted run starts from again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparkquant.stream import Batch


class RowStore:
    """States in front of a block: [B, L, H] per batch and stream. Generation g + 1 is written while g is read."""

    def __init__(
        self, folder: Path, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, streams: Sequence[str]
    ) -> None:
        self._folder, self._streams = folder, streams
        self._shapes = list(shapes)
        self._starts = [0]
        for shape in self._shapes:
            self._starts.append(self._starts[-1] + math.prod(shape))
        self._dtype = dtype
        self._maps = {g: {name: self._map(g, name) for name in streams} for g in (0, 1)}

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return 2 * len(self._streams) * self._starts[-1] * self._dtype.itemsize

    def _map(self, generation: int, stream: str) -> Tensor:
        path = self._folder / f"rows-{generation}-{stream}.bin"
        return torch.from_file(str(path), shared=True, size=max(1, self._starts[-1]), dtype=self._dtype)

    def _view(self, generation: int, stream: str, batch: int) -> Tensor:
        span = self._maps[generation % 2][stream][self._starts[batch] : self._starts[batch + 1]]
        return span.view(self._shapes[batch])

    def read(self, generation: int, stream: str, batch: int) -> Tensor:
        """States of one batch, as a view of the file."""
        return self._view(generation, stream, batch)

    def write(self, generation: int, stream: str, batch: int, states: Tensor) -> None:
        """Store states of one batch."""
        self._view(generation, stream, batch).copy_(states)

    def start(self, batches: Sequence[Batch]) -> None:
        """Every stream begins with the embedded rows, as generation 0."""
        for index, batch in enumerate(batches):
            for stream in self._streams:
                self.write(0, stream, index, batch.hidden)
