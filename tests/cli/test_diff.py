"""`sparkquant diff` never says "no differences" of things that differ."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkquant import evidence
from sparkquant.checkpoint import Checkpoint
from sparkquant.comparison import Difference, diff
from sparkquant.errors import UsageError
from sparkquant.planning import plan
from tests.cli.running import DEMO, invoke


def write_plan(path: Path, edit: Callable[[dict[str, Any]], object] = lambda fields: None) -> Path:
    fields = plan(DEMO).as_json()
    edit(fields)
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda p: p["recipe"].update(method={"name": "rtn"}), "recipe.method.name"),
        (lambda p: p["recipe"].update(name="other"), "recipe.name"),
        (lambda p: p["recipe"]["schemes"].update({"mlp.down": "keep"}), "recipe.schemes.mlp.down"),
        (lambda p: p["source"].update(headers="0" * 64), "source.headers"),
        (lambda p: p["shards"][0]["tensors"].reverse(), "shard "),
        (lambda p: p["shards"].pop(), "shard "),
        (lambda p: p["notes"].append("mind the gap"), "note"),
        (lambda p: p["engines"].append("9.9"), "engines"),
        (lambda p: p["decisions"][0].update(because="a whim"), "(because)"),
        (lambda p: p["decisions"][0].update(shape=[1]), "(shape)"),
        (lambda p: p["decisions"].pop(), "."),
        (lambda p: p["decisions"].reverse(), "order or unknown keys"),
        (lambda p: p.update(more=1), "order or unknown keys"),
    ],
)
def test_plans_that_differ_anywhere_show_it(
    edit: Callable[[dict[str, Any]], object], what: str, tmp_path: Path
) -> None:
    a, b = write_plan(tmp_path / "a.json"), write_plan(tmp_path / "b", edit)
    changes = diff(a, b).changes
    assert changes
    assert what in changes[0].what
    assert "no differences" not in invoke("diff", a, b).stdout
    assert diff(b, b).changes == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model_type": "qwen3_5"}', "no plan"),
        ("{", "no plan"),
        ("[]", "no plan"),
        ("name: x", "no plan"),
        ('{"format": 2, "decisions": []}', "format"),
        ('{"format": 1, "decisions": [1]}', "damaged"),
        ('{"format": 1, "decisions": [], "shards": [], "classes": [], "source": 5}', "damaged"),
    ],
)
@pytest.mark.parametrize("name", ["x.json", "x"])
def test_what_is_no_plan_is_refused(text: str, says: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=says):
        diff(tmp_path / name, tmp_path / name)
    result = invoke("diff", tmp_path / name, tmp_path / name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "hint:" in result.stderr


def flipped(folder: Path, name: str) -> Path:
    """A copy of the demo checkpoint with the last byte of one tensor changed."""
    shutil.copytree(DEMO, folder)
    header = Checkpoint.open(folder).tensors[name]
    with (folder / header.shard).open("r+b") as file:
        file.seek(header.start + header.bytes - 1)
        last = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([last ^ 1]))
    return folder


def test_checkpoints_with_other_weights_differ(tmp_path: Path) -> None:
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    other = flipped(tmp_path / "other", name)
    assert [change.what for change in diff(DEMO, other).changes] == [name]
    result = invoke("diff", DEMO, other)
    assert f"~ {name}: BF16 " in result.stdout
    shallow = invoke("diff", DEMO, other, "--headers")
    assert "no differences" in shallow.stdout
    assert "headers and configs only: no weight was read" in shallow.stdout
    assert "headers" in json.loads(invoke("diff", DEMO, other, "--headers", "--json").stdout)["compared"]


def test_checkpoints_with_other_side_files_differ(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "other")
    assert diff(DEMO, tmp_path / "other").changes == ()
    with (tmp_path / "other" / "tokenizer_config.json").open("a", encoding="utf-8") as file:
        file.write(" ")
    assert [change.what for change in diff(DEMO, tmp_path / "other").changes] == ["tokenizer_config.json"]


def test_headers_are_of_checkpoints_and_sources_of_recipes() -> None:
    assert invoke("diff", "qwen-hybrid-fp8", "qwen-hybrid-fp8", "--headers").exit_code == 2
    refused = invoke("diff", DEMO, DEMO, "--source", DEMO)
    assert refused.exit_code == 2
    assert "a source is for recipes" in refused.stderr


# By class, in bytes, in quality


def changed(found: Difference) -> dict[str, tuple[str, str]]:
    return {
        change.layer_class: (
            ", ".join(held.scheme for held in change.before),
            ", ".join(held.scheme for held in change.after),
        )
        for change in found.classes
        if change.changed
    }


def test_recipes_differ_by_class() -> None:
    found = diff("qwen-hybrid-w4a16", "qwen-hybrid-w4a16-head")
    assert changed(found) == {"lm_head": ("keep", "w4a16 g128")}
    assert found.bytes == (None, None)
    assert changed(diff("qwen-hybrid-fp8", "qwen-hybrid-fp8-mtp")) == {"mtp": ("keep", "fp8_block")}


def test_recipes_are_compared_by_what_they_make_of_a_source() -> None:
    found = diff("qwen-hybrid-w4a16", "qwen-hybrid-w4a16-head", source=DEMO)
    plans = [plan(DEMO, name) for name in ("qwen-hybrid-w4a16", "qwen-hybrid-w4a16-head")]
    assert found.bytes == tuple(made.totals["output_bytes"] for made in plans)
    assert changed(found) == {"lm_head": ("keep", "w4a16 g128")}
    text = invoke("diff", "qwen-hybrid-w4a16", "qwen-hybrid-w4a16-head", "--source", DEMO).stdout
    assert re.search(r"^lm_head +keep +w4a16 g128 +1\.00 MiB +264\.02 KiB +-74.2%$", text, re.MULTILINE)
    assert re.search(r"^total +5\.19 MiB +4\.44 MiB +-14\.3%$", text, re.MULTILINE)


def test_plans_differ_by_class_and_bytes(tmp_path: Path) -> None:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, recipe in zip(paths, ("qwen-hybrid-w4a16", "qwen-hybrid-nvfp4a16-mlp"), strict=True):
        path.write_text(plan(DEMO, recipe).to_json(), encoding="utf-8")
    found = diff(*paths)
    assert changed(found)["mlp.down"] == ("w4a16 g128", "nvfp4a16")
    assert changed(found)["attention.out"] == ("w4a16 g128", "keep")
    assert None not in found.bytes
    for key in ("before", "after"):
        listed = json.loads(invoke("diff", *paths, "--json").stdout)
        assert sum(held["bytes"] for row in listed["classes"] for held in row[key]) == listed["bytes"][key]


def test_checkpoints_differ_by_class(quantized: Path) -> None:
    found = diff(DEMO, quantized)
    stored = [
        sum(header.bytes for header in Checkpoint.open(side, strict=False).tensors.values())
        for side in (DEMO, quantized)
    ]
    assert found.bytes == tuple(stored)
    assert set(changed(found).values()) == {("16-bit", "w4a16 g128")}
    assert found.quality is None
    text = invoke("diff", DEMO, quantized).stdout
    assert "more (--all or --json lists them)" in text
    assert len(invoke("diff", DEMO, quantized, "--all").stdout.splitlines()) > len(text.splitlines())


def evaluated(folder: Path, original: Path, rows: list[float], data: str = "same") -> Path:
    """A copy of a result with a record of `evaluate`."""
    shutil.copytree(original, folder)
    result = {
        "rows": len(rows), "tokens": 100, "data": data, "kl_mean": sum(rows) / len(rows), "kl_se": 0.001, "kl_p99": 0.2,
        "kl_rows": rows, "top1": 0.9, "nll": {"source": 1.5, "result": 1.52},
        "recall": {"tasks": 4, "source": 3, "result": 2, "lost": 1},
        "acceptance": {"edit": {"source": [0.7, 0.4], "result": [0.6, 0.3]}}, "drafts": {"edit": 100},
    }  # fmt: skip
    evidence.record(folder, "evaluate", result)
    return folder


def test_quality_is_compared_row_by_row(quantized: Path, tmp_path: Path) -> None:
    a = evaluated(tmp_path / "a", quantized, [0.02, 0.08, 0.05])
    b = evaluated(tmp_path / "b", quantized, [0.01, 0.07, 0.03])
    found = diff(a, b).quality
    assert found is not None
    assert found.paired is not None
    assert found.paired.mean == pytest.approx(-0.04 / 3)
    assert found.paired.se == pytest.approx(0.01 / 3)
    assert found.numbers["first_draft"] == (0.6, 0.6)
    text = invoke("diff", a, b).stdout
    assert "-0.01333 ± 0.00333" in text
    assert "over 3 rows" in text


def test_quality_that_cannot_be_compared_says_why(quantized: Path, tmp_path: Path) -> None:
    a = evaluated(tmp_path / "a", quantized, [0.02, 0.08])
    other = evaluated(tmp_path / "other", quantized, [0.02, 0.08], data="another")
    assert "different rows" in diff(a, other).quality.why  # type: ignore[union-attr]
    bare = diff(a, quantized).quality
    assert bare is not None
    assert (bare.paired, bare.numbers["kl_mean"]) == (None, (0.05, None))
    assert "out: not evaluated" in bare.why
    with (a / "config.json").open("a", encoding="utf-8") as file:
        file.write(" ")
    assert "its record is stale" in invoke("diff", a, other).stdout
    assert diff(a, other, headers=True).quality is None
