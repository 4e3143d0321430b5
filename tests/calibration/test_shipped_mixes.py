"""The shipped mixes serve as they are, and calibration/README.md states what they hold."""

from __future__ import annotations

import functools
import re
import textwrap
from pathlib import Path

import pytest

from sparkquant.calibration import CalibrationCheck, check_calibration, load_mix, mix_folder, mix_names
from sparkquant.calibration.calibration_set import histogram
from sparkquant.calibration.mix import Columns, Filters, Mix, Source, Wrap
from sparkquant.calibration.mix_files import mix_from_text
from sparkquant.calibration.sufficiency import ALLOWED, NULL_CONTENT
from tests.calibration.conftest import EXAMPLE

README = Path(__file__).resolve().parents[2] / "calibration" / "README.md"
NAMES = ("coding-agent", "general-chat", "long-context")


@functools.cache
def made(name: str) -> CalibrationCheck:
    return check_calibration(name, EXAMPLE)


def table(name: str) -> str:
    """The lines that README.md holds for a mix, measured."""
    calibration = made(name).calibration
    record = calibration.record()
    lengths: dict[str, list[int]] = {}
    for source, ids in zip(calibration.sources, calibration.rows, strict=True):
        lengths.setdefault(source, []).append(len(ids))
    steps = ", ".join(f"≤ {bound}: {rows}" for bound, rows in histogram(map(len, calibration.rows)))
    kinds = record["kinds"]
    lines = ["| source | conversations used of | rows | tokens | longest row |", "|---|---|---|---|---|"]
    for source, count in record["sources"].items():
        longest = max(lengths.get(source, [0]))
        lines.append(
            f"| {source} | {count['used']} of {count['used'] + count['unused']} | {count['rows']}"
            f" | {count['tokens']:,} | {longest:,} |"
        )
    lines.append(f"| **all** | | **{record['rows']}** | **{record['tokens']:,}** | |")
    lines += ["", f"Rows by tokens: {steps}. With reasoning: {kinds['thinking']}; with tools: {kinds['tools']};"]
    lines.append(f"parts of longer conversations: {kinds['part']}; cut off: {kinds['truncated']}.")
    return "\n".join(lines)


def test_the_shipped_mixes() -> None:
    assert set(NAMES) <= set(mix_names())
    assert mix_folder() == README.parent


@pytest.mark.parametrize("name", mix_names())
def test_a_shipped_mix_serves_as_it_is(name: str) -> None:
    check = made(name)
    assert check.ok, [str(c.message) for c in check.checks]
    assert not check.problems
    kinds = check.calibration.kinds
    assert kinds["thinking"] > 0
    assert kinds["thinking"] < len(check.calibration.rows)
    assert kinds["truncated"] <= 0.2 * len(check.calibration.rows)
    assert all(count["rows"] for count in check.calibration.counts.values())


@pytest.mark.parametrize("name", mix_names())
def test_the_readme_states_what_a_mix_holds(name: str) -> None:
    text = README.read_text(encoding="utf-8")
    assert f"### `{name}`" in text
    assert table(name) in text, f"calibration/README.md should say:\n{table(name)}"
    assert load_mix(name).summary in text


def test_the_readme_names_every_key_of_a_mix() -> None:
    text = README.read_text(encoding="utf-8")
    for model in (Mix, Source, Filters, Wrap, Columns):
        hidden = {"source", "folder"} if model is Mix else set()
        for key in set(model.model_fields) - hidden:
            assert re.search(rf"`{key}`|\b{key}:", text), f"{key} is not explained"


def test_the_examples_of_the_readme_are_valid() -> None:
    text = README.read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    mix = mix_from_text(textwrap.dedent(example), source="README.md", folder=README.parent)
    assert set(mix.sources) == {"logs", "code"}
    for flag in (*ALLOWED, NULL_CONTENT):
        assert f"`{flag}`" in text
