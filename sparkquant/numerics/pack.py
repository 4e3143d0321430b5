"""Integer codes and FP4 codes to the packed tensors on disk, and back.

The layouts are those of compressed-tensors: 32 / bits codes in one int32, the first code in the
lowest bits, stored with an offset of 2**(bits - 1) so that they are unsigned; two FP4 codes in
one byte, the first in the low nibble. Trailing code positions of the last word are zero bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD_BITS = 32


def packed_columns(columns: int, bits: int) -> int:
    """Number of int32 words that hold `columns` codes of `bits` bits."""
    return -(-columns * bits // _WORD_BITS)


def pack_int32(codes: Tensor, bits: int) -> Tensor:
    """Pack along the last dimension: int8 [..., K] signed codes -> int32 [..., ceil(K*bits/32)].

    `bits` is 4 or 8. Raises ValueError on another width or dtype.
    """
    check_bits(bits)
    if codes.dtype is not torch.int8:
        raise ValueError(f"codes must be int8, got {codes.dtype}")
    columns = codes.shape[-1]
    words = packed_columns(columns, bits)
    per_word = _WORD_BITS // bits
    # int8 arithmetic wraps, so adding 128 and viewing as uint8 is exact.
    unsigned = (codes + (8 if bits == 4 else -128)).view(torch.uint8)
    unsigned = torch.nn.functional.pad(unsigned, (0, words * per_word - columns))
    if bits == 4:
        unsigned = pack_nibbles(unsigned)
    return _view_as(unsigned, torch.int32, words)


def unpack_int32(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Inverse of `pack_int32`: int32 [..., W] -> int8 [..., columns].

    Raises ValueError when `columns` codes do not fill exactly W words.
    """
    check_bits(bits)
    if packed.dtype is not torch.int32:
        raise ValueError(f"packed codes must be int32, got {packed.dtype}")
    if packed.shape[-1] != packed_columns(columns, bits):
        raise ValueError(
            f"{columns} codes of {bits} bits take {packed_columns(columns, bits)} words, "
            f"the packed tensor has {packed.shape[-1]}"
        )
    unsigned = _view_as(packed, torch.uint8, 4 * packed.shape[-1])
    if bits == 4:
        unsigned = unpack_nibbles(unsigned)
    return (unsigned[..., :columns] - (8 if bits == 4 else 128)).view(torch.int8)


def pack_zero_points(zero_points: Tensor, bits: int) -> Tensor:
    """Pack along the output rows: int8 [..., N, G] -> int32 [..., ceil(N*bits/32), G]."""
    return _transposed(pack_int32(_transposed(zero_points), bits))


def unpack_zero_points(packed: Tensor, bits: int, rows: int) -> Tensor:
    """Inverse of `pack_zero_points`: int32 [..., W, G] -> int8 [..., rows, G]."""
    return _transposed(unpack_int32(_transposed(packed), bits, rows))


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte, the first low: uint8 [..., K] of 0..15 -> uint8 [..., K/2].

    FP4 E2M1 codes are sign (8) plus index into 0, .5, 1, 1.5, 2, 3, 4, 6. Raises ValueError on an
    odd K.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"an even number of 4-bit codes is needed, got {codes.shape[-1]}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`: uint8 [..., K/2] -> uint8 [..., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _view_as(tensor: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
    """Reinterpret the bytes. Through one dimension: a dimension of size 1 may have any stride."""
    return tensor.contiguous().view(-1).view(dtype).view(*tensor.shape[:-1], columns)


def _transposed(tensor: Tensor) -> Tensor:
    """Swap the last two dimensions, with the strides of a fresh tensor."""
    swapped = tensor.transpose(-1, -2)
    return swapped.contiguous().view(-1).view(swapped.shape)


def check_bits(bits: int) -> None:
    """Raise ValueError unless `bits` is 4 or 8."""
    if bits not in (4, 8):
        raise ValueError(f"integer weights have 4 or 8 bits, got {bits}")
