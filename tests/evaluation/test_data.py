"""evaluation/README.md tells the truth about the bundled texts, and nothing of them is calibrated on."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sparkquant.calibration import load_mix, mix_folder, mix_names
from sparkquant.evaluation_data import evaluation_folder

FOLDER = Path(__file__).resolve().parents[2] / "evaluation"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<<<<<<< SEARCH\n(.*?)\n?=======\n(.*?)\n?>>>>>>> REPLACE", re.DOTALL)


@cache
def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def heldout(tag: str | None = None) -> list[dict[str, Any]]:
    return [entry for entry in lines("heldout.jsonl") if tag in (None, *entry["tags"])]


def recall(kind: str | None = None) -> list[dict[str, Any]]:
    return [entry for entry in lines("recall.jsonl") if kind in (None, entry["kind"])]


def texts(entry: dict[str, Any]) -> list[str]:
    """Everything that is said in an entry."""
    said = [m[key] for m in entry["messages"] for key in ("content", "reasoning_content") if key in m]
    return [*said, entry.get("answer", "")]


def fences(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_bundled_folder_is_this_one() -> None:
    assert evaluation_folder() == FOLDER


def test_counts_are_those_of_the_readme() -> None:
    assert f"| {len(heldout())} conversations |" in README
    assert f"| {len(recall())} tasks |" in README
    for tag in ("edit", "fresh"):
        count, thinking = len(heldout(tag)), sum(entry["thinking"] for entry in heldout(tag))
        assert f"| `{tag}` | {count} | {thinking} |" in README
    for kind, count in Counter(entry["kind"] for entry in recall()).items():
        assert f"| `{kind}` | {count} |" in README
    assert sum(entry["messages"][0]["role"] == "system" for entry in heldout()) == 11
    assert sum(len(entry["messages"]) > 3 for entry in heldout("edit")) == 4
    for name in ("heldout.jsonl", "recall.jsonl"):
        kilobytes = (FOLDER / name).stat().st_size / 1000
        stated = re.search(rf"\| `{name}` \| [^|]+\| (\d+) \|", README)
        assert stated is not None
        assert int(stated[1]) == pytest.approx(kilobytes, abs=1)


def test_ids_are_unique() -> None:
    ids = [entry["id"] for entry in (*heldout(), *recall())]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("entry", heldout(), ids=lambda entry: entry["id"])
def test_a_conversation_is_as_promised(entry: dict[str, Any]) -> None:
    assert set(entry) == {"id", "source", "tags", "thinking", "messages"}
    assert entry["tags"] in (["edit"], ["fresh"])
    messages = entry["messages"]
    body = messages[1:] if messages[0]["role"] == "system" else messages
    assert [m["role"] for m in body] == ["user", "assistant"] * (len(body) // 2)
    answers = [m for m in body if m["role"] == "assistant"]
    assert all(("reasoning_content" in m) is entry["thinking"] for m in answers)
    for text in texts(entry)[:-1]:
        assert text
        assert text == text.strip()
        assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0
        for language, code in fences(text):
            if BLOCK.search(code):
                continue
            if language == "python":
                ast.parse(code)
            elif language == "json":
                json.loads(code)


def test_edits_copy_and_fresh_texts_do_not() -> None:
    shares: dict[str, list[float]] = {"edit": [], "fresh": []}
    for entry in heldout():
        seen: set[str] = set()
        for message in entry["messages"]:
            said = [line.strip() for line in message["content"].splitlines() if len(line.strip()) > 12]
            if message["role"] == "assistant":
                shares[entry["tags"][0]].append(sum(line in seen for line in said) / max(1, len(said)))
            seen.update(said)
    assert sum(shares["edit"]) / len(shares["edit"]) > 0.6
    assert max(shares["fresh"]) < 0.05


def test_search_parts_of_edits_are_found_once() -> None:
    edited = set()
    for entry in heldout("edit"):
        asked = "\n".join(m["content"] for m in entry["messages"] if m["role"] == "user")
        answers = [m["content"] for m in entry["messages"] if m["role"] == "assistant"]
        for search, replace in (block for answer in answers for block in BLOCK.findall(answer)):
            assert asked.count(search) == 1, entry["id"]
            assert search != replace
            edited.add(entry["id"])
        assert sum(map(len, map(BLOCK.findall, answers))) == sum(answer.count("<<<<<<<") for answer in answers)
    assert len(edited) == 7


@pytest.mark.parametrize("entry", recall(), ids=lambda entry: entry["id"])
def test_a_task_is_as_promised(entry: dict[str, Any]) -> None:
    assert set(entry) == {"id", "kind", "messages", "answer"}
    (message,) = entry["messages"]
    assert message["role"] == "user"
    question, answer = message["content"], entry["answer"]
    assert answer
    assert answer == answer.strip()
    assert "\n" not in answer
    if entry["kind"] == "signature":
        assert answer[0] == answer[-1] == "`"
        assert question.count(answer.strip("`")) == 1
        compile(f"def {answer.strip('`')}: ...", "answer", "exec")
    elif entry["kind"] == "lookup":
        assert question.count(answer) == 1
    elif entry["kind"] == "multi_file":
        assert answer not in question
    else:
        assert entry["kind"] == "argument"
        arguments = json.loads(answer)
        assert json.dumps(arguments) == answer
        ((_, schema),) = fences(question)
        known = list(json.loads(schema)["parameters"]["properties"])
        assert [key for key in known if key in arguments] == list(arguments)


# Apart from calibration


def shingles(text: str) -> set[tuple[str, ...]]:
    """Sequences of eight words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}


def test_hardly_a_phrase_is_shared_with_the_calibration_data() -> None:
    mine = set().union(*(shingles(text) for entry in (*heldout(), *recall()) for text in texts(entry)))
    theirs: set[tuple[str, ...]] = set()
    for path in sorted(mix_folder().glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            theirs |= shingles(" ".join(re.findall(r"[^\x00]+", json.dumps(json.loads(line), ensure_ascii=False))))
    assert len(theirs) > 100_000
    assert len(mine & theirs) <= 25


def test_no_two_conversations_are_alike() -> None:
    every = [set().union(*map(shingles, texts(entry))) for entry in heldout()]
    assert max(len(a & b) for i, a in enumerate(every) for b in every[:i]) <= 20


@pytest.mark.parametrize("name", mix_names())
def test_no_mix_reads_the_evaluation_data(name: str) -> None:
    mix = load_mix(name)
    for source in mix.sources.values():
        for pattern in (*source.conversations, *source.text):
            for path in mix.folder.glob(pattern):
                assert FOLDER not in path.resolve().parents
