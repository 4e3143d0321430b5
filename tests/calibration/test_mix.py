"""Mixes are strict: every fault at once, each with its place; shipped ones and files are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkquant.calibration import load_mix, mix_names
from sparkquant.calibration.mix_files import mix_from_text
from sparkquant.errors import CalibrationError

GOOD = """\
name: mine
summary: my own logs and code
rows: 8
tokens: 256
seed: 3
sources:
  logs: {conversations: [logs.jsonl, more/*.jsonl], share: 3, filters: {languages: en, min_tokens: 5, max_tokens: 90}}
  code: {text: "src/**/*.py", exclude: src/gen, wrap: {user: "Show {path}", assistant: "{text}"}}
  table: {table: data/*.parquet, columns: {messages: chat}}
  hub: {hub: owner/name, split: train, columns: {user: q, assistant: a}, limit: 10}
"""


def faults(text: str) -> list[str]:
    with pytest.raises(CalibrationError) as caught:
        mix_from_text(text, source="m.yaml", folder=Path())
    return [str(problem) for problem in caught.value.problems] or [caught.value.what]


def test_a_good_mix(tmp_path: Path) -> None:
    mix = mix_from_text(GOOD, source="m.yaml", folder=tmp_path)
    assert (mix.rows, mix.tokens, mix.seed) == (8, 256, 3)
    assert [source.kind for source in mix.sources.values()] == ["conversations", "text", "table", "hub"]
    assert mix.sources["logs"].filters.languages == ("en",)
    assert mix.folder == tmp_path


def test_the_digest_covers_what_it_says_not_where_it_lies(tmp_path: Path) -> None:
    digest = mix_from_text(GOOD, source="m.yaml", folder=tmp_path).digest
    assert mix_from_text("# a comment\n" + GOOD, source="other.yaml", folder=tmp_path / "x").digest == digest
    assert mix_from_text(GOOD.replace("seed: 3", "seed: 4"), source="m.yaml", folder=tmp_path).digest != digest


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("rows: 8", "row: 8", "m.yaml:3:1: unknown key 'row'; did you mean 'rows'?"),
        ("rows: 8", "rows: eight", "m.yaml:3:7: rows: Input should be a valid integer"),
        ("rows: 8", "rows: 0", "m.yaml:3:7: rows: Input should be greater than or equal to 1"),
        ("seed: 3", "seed: 3\nseed: 4", "m.yaml:6:1: 'seed' twice"),
        ("share: 3", "share: 0", "sources.logs.share: Input should be greater than 0"),
        ("share: 3", "shares: 3", "did you mean 'share'?"),
        ("languages: en", "language: en", "did you mean 'languages'?"),
        ("min_tokens: 5", "min_tokens: 500", "min_tokens 500 is above max_tokens 90"),
        ('{text: "src/**/*.py", ', '{text: "src/**/*.py", split: x, ', "'split' means nothing for a source of text"),
        ('assistant: "{text}"', "assistant: it", "m.yaml:8:55: neither user nor assistant holds {text}"),
        ("columns: {messages: chat}", "share: 2", "does not say what its columns hold"),
        ("{messages: chat}", "{messages: chat, text: t}", "columns need one of"),
        ("{user: q, assistant: a}", "{user: q}", "user and assistant go together"),
        ("{table: data/*.parquet, ", "{table: x, text: y, ", "needs exactly one of conversations, text, table, hub"),
        ("{table: data/*.parquet, ", "{", "found none"),
        ("hub: owner/name", "hub: name", "sources.hub.hub: String should match"),
        ("logs:", "My Logs:", "m.yaml:7:3: sources.My Logs"),
        ("name: mine", "name: mine\nfolder: x", "unknown key 'folder'"),
        ("summary: my own logs and code\n", "", "'summary' is missing"),
        ("exclude: src/gen", "filters: {tags: x}", "plain texts have no tags"),
    ],
)
def test_faults_point_at_their_place(old: str, new: str, expected: str) -> None:
    assert old in GOOD
    found = faults(GOOD.replace(old, new))
    assert any(expected in fault for fault in found), found


def test_all_faults_at_once() -> None:
    found = faults(
        GOOD.replace("rows: 8", "row: 8").replace("share: 3", "share: -1").replace("hub: owner/name", "hub: x")
    )
    assert len(found) == 3


@pytest.mark.parametrize(
    "text", ["", "[]", "name: x", "a: &x 1\nb: *x", "name: [", "sources: 7", "sources: {a: 7}", "1: 2"]
)
def test_odd_documents_are_refused(text: str) -> None:
    assert all("recipe" not in fault for fault in faults(text))


def test_missing_mixes_name_what_there_is(tmp_path: Path) -> None:
    for spec in ("coding-agnet", tmp_path / "no.yaml", tmp_path / "no.jsonl", "no.json"):
        with pytest.raises(CalibrationError):
            load_mix(spec)


def test_a_bare_file_does_not_name_itself(tmp_path: Path) -> None:
    path = tmp_path / "secret [customer].jsonl"
    path.write_text("")
    mix = load_mix(path)
    assert mix.name == "conversations"
    assert list(mix.sources) == ["conversations"]
    assert mix_names() == sorted(mix_names())
