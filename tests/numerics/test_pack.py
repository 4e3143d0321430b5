"""Packing: lossless, and word for word what compressed-tensors writes and reads."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparkquant.numerics import pack
from sparkquant.numerics.rounding import e2m1_code, e2m1_value

SIZES = st.integers(1, 41)


def codes(bits: int, *shape: int) -> Tensor:
    low = -(2 ** (bits - 1))
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, -low, shape, dtype=torch.int8, generator=generator)


@pytest.mark.parametrize("bits", [4, 8])
@given(rows=SIZES, columns=SIZES)
def test_pack_equals_compressed_tensors_and_is_lossless(bits: int, rows: int, columns: int) -> None:
    given_codes = codes(bits, rows, columns)
    packed = pack.pack_int32(given_codes, bits)
    assert torch.equal(packed, pack_to_int32(given_codes, bits))
    assert torch.equal(pack.unpack_int32(packed, bits, columns), given_codes)
    assert torch.equal(unpack_from_int32(packed, bits, given_codes.shape), given_codes)


@pytest.mark.parametrize("bits", [4, 8])
@given(rows=SIZES, groups=SIZES)
def test_zero_points_pack_along_rows(bits: int, rows: int, groups: int) -> None:
    zeros = codes(bits, rows, groups)
    packed = pack.pack_zero_points(zeros, bits)
    assert packed.is_contiguous()
    assert torch.equal(packed, pack_to_int32(zeros, bits, packed_dim=0))
    assert torch.equal(pack.unpack_zero_points(packed, bits, rows), zeros)


@given(rows=SIZES, pairs=SIZES)
def test_nibbles_are_lossless(rows: int, pairs: int) -> None:
    nibbles = (codes(4, rows, 2 * pairs) + 8).to(torch.uint8)
    assert torch.equal(pack.unpack_nibbles(pack.pack_nibbles(nibbles)), nibbles)


def test_fp4_bytes_are_those_of_compressed_tensors() -> None:
    every_pair = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8).view(16, 32)
    values = e2m1_value(every_pair)
    packed = pack.pack_nibbles(every_pair)
    assert torch.equal(packed, pack_fp4_to_uint8(values))
    assert torch.equal(values, unpack_fp4_from_uint8(packed, 16, 32, dtype=torch.float32))
    # Code 8 is -0.0, which is written for negative values that round to zero.
    assert torch.equal(e2m1_code(values) % 8, every_pair % 8)


def test_experts_pack_one_by_one() -> None:
    stacked = codes(4, 3, 5, 24)
    assert torch.equal(pack.pack_int32(stacked, 4), torch.stack([pack.pack_int32(one, 4) for one in stacked]))
    assert torch.equal(pack.pack_zero_points(stacked, 4)[1], pack.pack_zero_points(stacked[1], 4))


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="4 or 8 bits, got 3"):
        pack.pack_int32(codes(4, 1, 8), 3)
    with pytest.raises(ValueError, match="must be int8"):
        pack.pack_int32(torch.zeros(1, 8), 4)
    with pytest.raises(ValueError, match="must be int32"):
        pack.unpack_int32(torch.zeros(1, 8), 4, 64)
    with pytest.raises(ValueError, match="17 codes of 4 bits take 3 words, the packed tensor has 2"):
        pack.unpack_int32(torch.zeros(1, 2, dtype=torch.int32), 4, 17)
    with pytest.raises(ValueError, match="even number"):
        pack.pack_nibbles(torch.zeros(1, 3, dtype=torch.uint8))
