"""Single tensors of a checkpoint; the package keeps its shards open instead."""

from __future__ import annotations

from torch import Tensor

from sparkquant.checkpoint import Checkpoint
from sparkquant.reading import ShardReader


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """One tensor in its stored dtype."""
    with ShardReader(checkpoint) as reader:
        return reader.read(name)
