"""Tensor bytes from shards into torch, by positioned reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparkquant.checkpoint import Checkpoint
from sparkquant.shard_files import ShardFiles

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""safetensors dtype names and their torch types."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class ShardReader(ShardFiles):
    """Open shards of one checkpoint; reads whole tensors or slices of dimension 0, from any number of threads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._checkpoint = checkpoint

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
        self.fill(header, first * row, raw.numpy().data)
        return raw.view(TORCH_DTYPES[header.dtype]).reshape(shape)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in row order, without a copy where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
