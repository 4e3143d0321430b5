"""Bytes and schemes of a folder, against its headers and its plan, whoever made it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkquant.checkpoint import Checkpoint
from sparkquant.contents import Contents, contents_of
from sparkquant.planning import plan
from sparkquant.verification.subject import Subject, open_checkpoint
from tests.data.published import (
    QWEN3_5_27B,
    QWEN3_5_27B_BYTES,
    QWEN3_5_27B_PARAMETERS,
    qwen3_5_27b_shapes,
    write_headers,
)
from tests.reporting.conftest import EXAMPLE


def contents(folder: Path) -> Contents:
    return contents_of(Subject(open_checkpoint(folder), None))


def test_of_the_27b_nothing_is_missed(tmp_path: Path) -> None:
    found = contents(write_headers(tmp_path / "big", QWEN3_5_27B, qwen3_5_27b_shapes(), shards=18))
    assert (found.bytes, found.parameters) == (QWEN3_5_27B_BYTES, QWEN3_5_27B_PARAMETERS)
    assert found.bits_per_weight == pytest.approx(16)
    assert found.unknown == ()
    assert list(found.layers) == ["outside", *map(str, range(64))]
    assert found.schemes == ("16-bit",)
    assert {name for name in found.layers["3"] if name.startswith("attention")} == {"attention.qkv", "attention.out"}
    assert "mtp" not in found.layers["0"]


@pytest.mark.parametrize("recipe", ["qwen-hybrid-w4a16", "qwen-hybrid-nvfp4-fp8"])
def test_of_a_result_they_are_those_of_the_plan(recipe: str, int4: Path, mixed: Path) -> None:
    out = int4 if recipe == "qwen-hybrid-w4a16" else mixed
    found = contents(out)
    assert found.bytes == sum(header.bytes for header in Checkpoint.open(out, strict=False).tensors.values())
    made = plan(EXAMPLE, recipe)
    assert found.bits_per_weight == pytest.approx(made.totals["bits_per_weight"], abs=2e-3)
    planned = {(row["class"], row["scheme"].replace("keep", "16-bit")): row["output_bytes"] for row in made.by_class}
    assert {(row.layer_class, row.scheme): row.bytes for row in found.rows} == planned


def test_a_family_that_nobody_knows_is_counted_all_the_same(tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "odd", {"model_type": "martian", "architectures": ["M"]}, {"a.weight": (4, 8)})
    found = contents(folder)
    assert (found.bytes, found.parameters, found.unknown) == (64, 32, ("a",))
    assert [row.layer_class for row in found.rows] == ["unknown"]
    assert json.loads(json.dumps(found.as_json()))["unknown"] == ["a"]
