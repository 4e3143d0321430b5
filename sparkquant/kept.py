"""A tensor that is kept: looked at, then copied byte for byte."""

from __future__ import annotations

from sparkquant.backends.planned import not_finite
from sparkquant.checkpoint import TensorHeader
from sparkquant.shard_files import ShardFiles
from sparkquant.shard_writer import ShardWriter

CHUNK_BYTES = 8 * 2**20


def copy_kept(header: TensorHeader, files: ShardFiles, writer: ShardWriter) -> None:
    """Copy a source tensor. Raises NonFiniteWeight naming tensor and index: one NaN in a gate makes the model NaN."""
    _require_finite(header, files)
    writer.copy(header.name, header.dtype, header.shape, files.file(header.shard), header.start, header.bytes)


def _require_finite(header: TensorHeader, files: ShardFiles) -> None:
    from sparkquant.numerics import arrays

    if header.dtype not in arrays.FLOATS:
        return
    buffer = bytearray(min(CHUNK_BYTES, header.bytes))
    for start in range(0, header.bytes, CHUNK_BYTES):
        view = memoryview(buffer)[: header.bytes - start]
        files.fill(header, start, view)
        codes = arrays.bits(view, header.dtype)
        index = arrays.first_not_finite(codes, header.dtype)
        if index is not None:
            position = arrays.position(start // codes.itemsize + index, header.shape)
            raise not_finite(header.name, position, arrays.value(codes[index], header.dtype))
