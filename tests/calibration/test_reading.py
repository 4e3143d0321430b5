"""Files as they come: broken lines, odd encodings, folders in any order."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import sparkquant.calibration.jsonl as jsonl
from sparkquant.calibration.conversation import Conversation, Dropped, Item, Passage, Reason
from sparkquant.calibration.jsonl import read_records
from sparkquant.calibration.mix import Mix, parse_mix
from sparkquant.calibration.source_files import read_source
from sparkquant.errors import CalibrationError
from tests.calibration.conftest import chat, write_jsonl


def mix_of(folder: Path, **source: Any) -> Mix:
    fields = {"name": "m", "summary": "a mix of a test", "sources": {"s": source}}
    return parse_mix(fields, source="m.yaml", folder=folder)


def read(folder: Path, **source: Any) -> list[Item | Dropped]:
    return list(read_source(mix_of(folder, **source), "s"))


def outcome(path: Path) -> list[str]:
    found = read_records(path, path.name)
    return [f"{r.where} {r.reason}" if isinstance(r, Dropped) else r[0] for r in found]


def test_broken_lines_are_told_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n{"a": \n{"a": 2}\r{"b": "\xff"}\n' + b"[" * 100_000 + b'\n{"c": 3}')
    assert outcome(path) == [
        "a.jsonl:1", "a.jsonl:3 invalid-json", "a.jsonl:4",
        "a.jsonl:5 not-utf-8", "a.jsonl:6 invalid-json", "a.jsonl:7",
    ]  # fmt: skip


def test_huge_lines_are_skipped_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_CHARS", 100)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"a": "x" * 950}) + '\n{"a": 1}\n' + "y" * 100)
    assert outcome(path) == ["a.jsonl:1 line-too-long", "a.jsonl:2", "a.jsonl:3 line-too-long"]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\n\n \n"])
def test_empty_files_hold_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert outcome(path) == []


def test_a_json_list_holds_records_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"a": 1}, {"a": 2}]))
    assert outcome(path) == ["a.json[1]", "a.json[2]"]
    path.write_text("[{")
    assert outcome(path) == ["a.json invalid-json"]


def test_an_unreadable_file_is_a_reason(tmp_path: Path) -> None:
    assert outcome(tmp_path / "none.jsonl") == ["none.jsonl unreadable-file"]


def test_conversations_from_globs_and_folders(tmp_path: Path) -> None:
    (tmp_path / "logs" / ".hidden").mkdir(parents=True)
    write_jsonl(tmp_path / "logs" / "b.jsonl", [chat(1), 7])
    write_jsonl(tmp_path / "logs" / "a.jsonl", [chat(2)])
    write_jsonl(tmp_path / "logs" / ".hidden" / "c.jsonl", [chat(3)])
    (tmp_path / "logs" / "notes.txt").write_text("not a log")
    for pattern in ("logs", "logs/*.jsonl", str(tmp_path / "logs")):
        found = read(tmp_path, conversations=pattern)
        assert [item.where for item in found] == ["logs/a.jsonl:1", "logs/b.jsonl:1", "logs/b.jsonl:2"]
        assert [type(item) for item in found] == [Conversation, Conversation, Dropped]


def test_texts_become_passages_with_their_wrapping(tmp_path: Path) -> None:
    (tmp_path / "src" / "node_modules").mkdir(parents=True)
    (tmp_path / "src" / "a.py").write_bytes(b"\xef\xbb\xbfprint(1)\n")
    (tmp_path / "src" / "node_modules" / "b.py").write_text("print(2)")
    (tmp_path / "src" / "bad.py").write_bytes(b"\xff\xfe")
    (tmp_path / "src" / "zero.py").write_bytes(b"a\0b")
    (tmp_path / "src" / "empty.py").write_text(" \n")
    (tmp_path / "src" / "gone.py").write_text("x = 1")
    wrap = {"user": "Show {path}", "assistant": "{text}"}
    found = read(tmp_path, text=["src/**/*.py"], exclude=["src/gone.py"], wrap=wrap)
    passages = [item for item in found if isinstance(item, Passage)]
    assert [(p.path, p.text) for p in passages] == [("src/a.py", "print(1)\n")]
    told = passages[0].conversation("print(1)").messages
    assert [message["content"] for message in told] == ["Show src/a.py", "print(1)"]
    reasons = Counter(item.reason for item in found if isinstance(item, Dropped))
    assert reasons == {Reason.NOT_UTF8: 1, Reason.NOT_TEXT: 1, Reason.EMPTY: 1}


def test_a_pattern_that_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"no/\*\.jsonl names no file"):
        read(tmp_path, conversations="no/*.jsonl")


def test_a_named_file_may_be_hidden_and_odd(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages" / "[x]"
    folder.mkdir(parents=True)
    write_jsonl(folder / ".log.jsonl", [chat(1)])
    assert len(read(folder, conversations=".log.jsonl")) == 1
