"""Codes through a reciprocal are those of an IEEE division: every bfloat16 weight, every significand of a scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkquant.numerics import kernels_float, kernels_integer
from sparkquant.numerics.arrays import Array

FINITE = np.arange(2**16, dtype=np.uint16)[(np.arange(2**16) & 0x7F80) != 0x7F80]
ONE = 0x3F80
SCALES = np.arange(ONE, ONE + 128, dtype=np.uint16)
"""Every significand: another exponent moves all quotients by a power of two, which the weights do as well."""

EDGES = [0x0380, 0x0381, 0x7B7F, 0x7B00]
"""2**-120, below which the kernels divide, its neighbour, and the largest scales of FP8 and int4."""


def widened(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def integer_codes(x: Array, scale: Array, zeros: Array, floor: int) -> Array:
    packed = np.empty((len(scale), x.shape[1] * (1 if floor == -128 else 2) // (1 if floor == -128 else 4)), np.uint8)
    kernels_integer.encode(x, scale, zeros, np.float32(floor), packed)
    return packed


@pytest.mark.parametrize("sign", [0, 0x8000], ids=["positive", "negative"])
@pytest.mark.parametrize("floor", [-8, -128])
def test_integer_codes(floor: int, sign: int) -> None:
    scale = np.concatenate([SCALES, EDGES]).astype(np.uint16)[:, None] | np.uint16(sign)
    zeros = (np.arange(len(scale)) % 16 - 8 if floor == -8 else np.zeros(len(scale))).astype(np.int8)[:, None]
    for zero in (np.zeros_like(zeros), zeros):
        x = np.tile(FINITE, (len(scale), 1))
        assert (integer_codes(x, scale, zero, floor) == integer_codes(widened(x), scale, zero, floor)).all()


def test_integer_codes_are_those_of_numpy() -> None:
    x, scale = np.tile(FINITE, (len(SCALES), 1)), SCALES[:, None]
    with np.errstate(over="ignore"):
        wanted = np.clip(np.rint(widened(x) / widened(scale)), -128, 127).astype(np.int16) + 128
    assert (integer_codes(x, scale, np.zeros(scale.shape, np.int8), -128) == wanted).all()


def test_fp8_codes() -> None:
    scale = np.concatenate([SCALES, EDGES]).astype(np.uint16)[:, None]
    x = np.tile(FINITE, (len(scale), 1))
    found: list[Any] = []
    for values in (x, widened(x)):
        found.append(np.empty(x.shape, np.uint8))
        kernels_float.fp8_encode(values, 1, x.shape[1], scale, found[-1])
    assert (found[0] == found[1]).all()
