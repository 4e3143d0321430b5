"""Stored bytes that may not change unnoticed: the same input gives the same checkpoint in every release.

After a change that is meant, print the new digests with `python -m tests.numerics.test_golden`.
"""

from __future__ import annotations

import hashlib

import pytest

from tests.numerics.formats import FORMATS, Format, raw, weights

GOLDEN = {
    "int4-symmetric-g128": ("44800f35c0645b6e", "e23766fe7467964a"),
    "int4-asymmetric-g128": ("855b72c8934e65f8", "a8ff90093818f039"),
    "int4-symmetric-g-1": ("3645e60e66f4fe78", "a082cd7592908089"),
    "int8-symmetric-g128": ("c4209e99abf3be56", "3e2d33ac7f145993"),
    "int8-asymmetric-g128": ("7992b610947414f5", "a2e14499af676ac4"),
    "nvfp4": ("a3bac2ecde90cf52", "2390b5b3819544e7"),
    "fp8-channel": ("53998a41fa66abe8", "7954394db0875b22"),
    "fp8-block": ("830cb743bb2de8d1", "22b915d188953817"),
}


def digest(format: Format, search: bool) -> str:
    stored = format.quantize(weights(140, 512), search=search)
    parts = b"".join(raw(tensor).numpy().tobytes() for tensor in stored if tensor is not None)
    return hashlib.sha256(parts).hexdigest()[:16]


@pytest.mark.parametrize("search", [False, True], ids=["rtn", "mse"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_bytes_are_unchanged(format: Format, search: bool) -> None:
    assert digest(format, search) == GOLDEN[format.name][search]


if __name__ == "__main__":
    for each in FORMATS:
        print(f'    "{each.name}": ("{digest(each, False)}", "{digest(each, True)}"),')  # noqa: T201
