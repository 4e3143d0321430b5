"""`sparkquant diff` never says "no differences" of things that differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkquant.checkpoint import Checkpoint
from sparkquant.comparison import diff
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


def test_headers_are_of_checkpoints() -> None:
    assert invoke("diff", "qwen-hybrid-fp8", "qwen-hybrid-fp8", "--headers").exit_code == 2
