"""Tensor bytes from shards into torch, by positioned reads: a shard that shrinks under us is an error, not a crash."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import BinaryIO

import torch
from torch import Tensor

from sparkquant.checkpoint import Checkpoint, TensorHeader
from sparkquant.errors import CheckpointError

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""safetensors dtype names and their torch types."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class ShardReader:
    """Open shards of one checkpoint; reads whole tensors or slices of dimension 0, from any number of threads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, BinaryIO] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def file(self, shard: str) -> BinaryIO:
        """The open file of a shard."""
        path = self._checkpoint.path / shard
        with self._opening:
            if shard not in self._files:
                try:
                    self._files[shard] = path.open("rb", buffering=0)
                except OSError as error:
                    raise CheckpointError(f"{path}: {error.strerror}", hint="fetch the shard again") from None
            return self._files[shard]

    def read(self, name: str, *, first: int = 0, last: int | None = None, buffer: Tensor | None = None) -> Tensor:
        """Tensor `name`, or its slices `first:last` of dimension 0, in its stored dtype.

        `buffer` (uint8, one-dimensional, large enough) receives the bytes when given: the result is a view of it.
        What is stored quantized in the source comes dequantized, float32, in memory of its own.
        """
        if name in self._checkpoint.computed:
            value: Tensor = self._checkpoint.computed[name].load(first, last)
            return value
        header = self._checkpoint.tensors[name]
        shape = header.shape
        if shape and (first or last is not None):
            shape = ((shape[0] if last is None else last) - first, *shape[1:])
        row = header.bytes // header.shape[0] if header.shape and header.shape[0] else 0
        size = row * shape[0] if shape else header.bytes
        raw = torch.empty(size, dtype=torch.uint8) if buffer is None else buffer[:size]
        self._fill(header, header.start + first * row, raw)
        return raw.view(TORCH_DTYPES[header.dtype]).reshape(shape)

    def _fill(self, header: TensorHeader, start: int, raw: Tensor) -> None:
        descriptor = self.file(header.shard).fileno()
        view: memoryview = raw.numpy().data
        while view:
            count = os.preadv(descriptor, [view[: 2**30]], start)
            if count == 0:
                raise CheckpointError(
                    f"{self._checkpoint.path / header.shard}: ends inside {header.name}", hint="fetch the shard again"
                )
            view, start = view[count:], start + count


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """One tensor in its stored dtype."""
    with ShardReader(checkpoint) as reader:
        return reader.read(name)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in row order, without a copy where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
