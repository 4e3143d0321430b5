"""Weights by their 16-bit names, whatever form a checkpoint stores them in: what the stream of blocks reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from sparkquant.checkpoint import Checkpoint
from sparkquant.formats import StoredModule, stored_modules
from sparkquant.formats.dequantization import dequantized_rows
from sparkquant.reading import ShardReader


class StoredWeights:
    """Tensors of a 16-bit or quantized checkpoint; quantized modules are dequantized to float32 when they are read.

    `overlay` holds values that replace stored ones, by 16-bit name.
    """

    def __init__(self, checkpoint: Checkpoint, overlay: Mapping[str, Tensor] | None = None) -> None:
        self._checkpoint = checkpoint
        self._overlay = overlay or {}
        self._reader = ShardReader(checkpoint)
        self._modules: dict[str, StoredModule] = {}
        self._names: list[str] = []
        for module in stored_modules(checkpoint).values():
            if module.scheme is not None:
                self._modules[f"{module.name}.weight"] = module
                self._names.append(f"{module.name}.weight")
            else:
                self._names += [header.name for header in module.tensors.values()]

    def __enter__(self) -> StoredWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def names(self) -> Sequence[str]:
        """16-bit names of everything stored."""
        return self._names

    def read(self, name: str) -> Tensor:
        """One tensor: float32 where it was quantized, its stored dtype elsewhere."""
        if name in self._overlay:
            return self._overlay[name]
        module = self._modules.get(name)
        return self._reader.read(name) if module is None else dequantized_rows(self._checkpoint, module)
