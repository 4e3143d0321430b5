"""What is broken and what is merely poor."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.marlin.coherence import LONGEST_RUN, inspect
from tests.marlin.serving import SOURCE

GOOD = "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))  # 3!\n"


def ids(
    text: str, ids: list[int] | None = None, reason: str | None = "stop", logprobs: list[float] | None = None
) -> set[str]:
    return {finding.id for finding in inspect(text, ids, reason, logprobs)}


def test_a_good_answer_has_no_finding() -> None:
    assert inspect(GOOD, list(range(40)), "stop", [-0.1] * 40) == ()


@pytest.mark.parametrize(
    ("text", "tokens", "found"),
    [
        ("!" * 30, None, "exclamation-marks"),
        ("what? !!!! no", None, "exclamation-marks"),
        ("! ! ! ! ! !", None, "exclamation-marks"),
        ("caf\ufffd au lait", None, "broken-utf8"),
        ("a\x00b", None, "control-characters"),
        ("", [], "empty"),
        ("  \n ", [5], "empty"),
        ("the the", [3, 7, *[9] * LONGEST_RUN, 4], "repeated-token"),
        ("@" * 40, None, "repeated-token"),
        ("ab ab", [1, 2, 3] * 40, "loop"),
    ],
)
def test_what_is_found(text: str, tokens: list[int] | None, found: str) -> None:
    assert found in ids(text, tokens)


@pytest.mark.parametrize("value", [math.nan, None, math.inf, -math.inf, -9999.0])
def test_log_probabilities_that_are_none(value: float | None) -> None:
    found = inspect(GOOD, None, "stop", [-0.1, value, -0.2])
    assert [(f.id, f.broken) for f in found] == [("nan", True)]
    assert "the first at token 1" in str(found[0])


def test_an_answer_without_an_end_is_not_broken() -> None:
    found = inspect(GOOD, list(range(40)), "length", None)
    assert [(f.id, f.broken) for f in found] == [("no-eos", False)]
    assert inspect(GOOD, list(range(40)), None, None) == ()


def test_a_limit_may_cut_a_character_but_not_break_one() -> None:
    assert ids("done caf\ufffd", None, "length") == {"no-eos"}
    assert "broken-utf8" in ids("caf\ufffd au lait", None, "length")
    assert "broken-utf8" in ids("done caf\ufffd", None, "stop")


def test_conversations_and_code_are_no_false_alarm() -> None:
    path = SOURCE.parents[1] / "evaluation" / "heldout.jsonl"
    broken = []
    for line in path.read_text(encoding="utf-8").splitlines():
        for message in json.loads(line)["messages"]:
            text = message.get("content")
            if isinstance(text, str) and text.strip():
                broken += [str(finding) for finding in inspect(text) if finding.broken]
    assert broken == []


@given(st.lists(st.integers(0, 50), max_size=120), st.integers(1, 40))
def test_runs_are_found_whatever_is_around(around: list[int], length: int) -> None:
    place = random.Random(0).randrange(len(around) + 1)
    tokens = [*around[:place], *[99] * length, *around[place:]]
    found = {finding.id for finding in inspect("words enough", tokens)}
    longest = max(len(list(run)) for run in runs(tokens))
    assert ("repeated-token" in found) == (longest >= LONGEST_RUN)


def runs(tokens: list[int]) -> list[list[int]]:
    out: list[list[int]] = []
    for token in tokens:
        if out and out[-1][0] == token:
            out[-1].append(token)
        else:
            out.append([token])
    return out


@given(st.text(max_size=200), st.lists(st.one_of(st.none(), st.floats()), max_size=20))
def test_any_answer_can_be_inspected(text: str, logprobs: list[float | None]) -> None:
    for finding in inspect(text, None, "stop", logprobs):
        assert finding.what
        assert finding.id
