"""A checkpoint of a stranger is shown as text: no name, note or record of it becomes markup, script or formula."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkquant import evidence
from sparkquant.reporting import report_on
from sparkquant.reporting.markdown import code, escaped
from tests.reporting.conftest import Page, edit_json

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

ATTACK = "<script>alert(1)</script>"
NAMES = [
    "<b>bold<b>",
    "$\\frac{1}{0$",
    "a'b\"c&d;",
    "}{{ 7*7 }}{% raw %}",
    "line\nbreak\x1b[31m",
    "\u202egnp.exe",
    "--><svg onload=alert(1)>",
    "x" * 200,
]


def test_names_of_folders_are_text(copied: Callable[[str], Path]) -> None:
    folders = [copied(name) for name in NAMES]
    page = Page(report_on(folders))
    assert not {element.tag for element in page.root.every()} & {"script", "b"}
    assert not [e for e in page.root.every() if "onload" in e.attributes]
    heads = [cell.text for cell in page.root.all("table")[0].all("thead")[0].all("th")]
    assert heads == [
        "A <b>bold<b>", "B $\\frac{1}{0$", "C a'b\"c&d;", "D }{{ 7*7 }}{% raw %}", "E line\\nbreak\\x1b[31m",
        "F \\u202egnp.exe", "G --><svg onload=alert(1)>", "H " + "x" * 200,
    ]  # fmt: skip
    drawn = " ".join(text.text for text in page.root.all("text"))
    assert "B $\\frac{1}{0$" in drawn
    text = report_on(folders, form="md")
    assert not re.search(r"<[a-z]", text.partition("-->")[2])
    assert not re.search("[\x1b\u202e]", text)


def test_plans_and_records_are_text(copied: Callable[[str], Path]) -> None:
    hostile = copied("hostile")

    def spoil_plan(plan: dict) -> None:  # type: ignore[type-arg]
        plan["recipe"]["name"] = f"{ATTACK}|`x`"
        plan["recipe"]["method"]["name"] = ATTACK
        plan["notes"] = [ATTACK, "[click](javascript:alert(1))", 5, None]

    def spoil_record(record: dict) -> None:  # type: ignore[type-arg]
        result = record["result"]
        result["notes"] = [ATTACK]
        result["acceptance"] = {ATTACK: {"source": [0.5], "result": [0.4]}}
        result["drafts"] = {ATTACK: 100}
        result["undrafted"] = {ATTACK: ATTACK}
        record["date"] = ATTACK

    edit_json(hostile / "sparkquant" / "plan.json", spoil_plan)
    record = json.loads((hostile / "sparkquant" / "evidence" / "evaluate.json").read_text(encoding="utf-8"))
    spoil_record(record)
    record["checkpoint"] = evidence.checkpoint_digest(hostile)
    (hostile / "sparkquant" / "evidence" / "evaluate.json").write_text(json.dumps(record), encoding="utf-8")
    text = report_on([hostile])
    page = Page(text)
    assert not page.root.all("script")
    assert page.root.text.count(ATTACK) >= 4
    markdown = report_on([hostile], form="md")
    assert "<script" not in markdown
    assert not re.search(r"(?<!\\)\]\(javascript", markdown)
    rows = [line for line in markdown.splitlines() if line.startswith("| recipe")]
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == 3


def test_tensors_that_nobody_knows_are_listed_as_text(copied: Callable[[str], Path]) -> None:
    import struct

    hostile = copied("hostile")
    shard = sorted(hostile.glob("*.safetensors"))[0]
    raw = shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    name = next(name for name in header if name.endswith("mlp.down_proj.weight_packed"))
    spoiled = f"model.<img src=x onerror=alert(1)>{name}"
    header = {spoiled if key == name else key: value for key, value in header.items()}
    packed = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(packed)) + packed + raw[8 + length :])
    page = Page(report_on([hostile]))
    assert not page.root.all("img")
    assert "the family's layout does not know: model.<img src=x" in page.root.text


def test_markdown_is_escaped() -> None:
    assert escaped("a|b`c`<i>*x*_y_[z](u)#") == "a\\|b\\`c\\`&lt;i&gt;\\*x\\*\\_y\\_\\[z\\](u)\\#"
    assert code("sparkquant plan x") == "`sparkquant plan x`"
    assert "`" not in code("sparkquant plan `x`").replace("\\`", "")
