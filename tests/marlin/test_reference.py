"""A record of a reference that was damaged is refused with a reason: nothing in it may make a result look near."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sparkquant.errors import UsageError
from sparkquant.marlin.controls import Observation, Role
from sparkquant.marlin.dialect import Settings
from sparkquant.marlin.metrics import Acceptance
from sparkquant.marlin.prompts import Ask, Prompts
from sparkquant.marlin.reference import load_reference, save_reference
from sparkquant.marlin.replies import Completion

PROMPTS = Prompts(rows=((5, 6, 7), (8, 9)), asks=(Ask(kind="text", ids=(5, 6)),))
RUN = Observation(
    Role.REFERENCE, Settings(), None, version="0.25.1",
    answers={1: [Completion(text="a", token_ids=(1,), logprobs=(-0.5,), finish_reason="stop")]},
    scores=[[{6: -1.0, 1: -0.75}, {7: -2.0}], [{9: -0.5}]],
    acceptance=Acceptance(drafts=10, drafted=20, accepted=12, rates=(0.8, 0.4)),
)  # fmt: skip


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "reference.json.gz"
    save_reference(path, RUN, PROMPTS.digest, {"capability": "9.0"})
    return path


def test_what_was_saved_comes_back(stored: Path) -> None:
    run, about = load_reference(stored, PROMPTS)
    assert run.scores == RUN.scores
    assert run.answers == RUN.answers
    assert run.acceptance == RUN.acceptance
    assert about == {"capability": "9.0", "version": "0.25.1"}


NAN, INFINITE = float("nan"), float("-inf")


def scores(value: Any) -> dict[str, Any]:
    return {"scores": value}


@pytest.mark.parametrize(
    "damage",
    [
        scores([[[[6, NAN]], [[7, -2.0]]], [[[9, -0.5]]]]),
        scores([[[[6, "NaN"]], [[7, -2.0]]], [[[9, -0.5]]]]),
        scores([[[[6, -1.0], [1, INFINITE]], [[7, -2.0]]], [[[9, -0.5]]]]),
        scores([[[[6, 3.0]], [[7, -2.0]]], [[[9, -0.5]]]]),
        scores([[[[6, -1.0]], [[7, -2.0]]]]),
        scores([[[[6, -1.0]]], [[[9, -0.5]]]]),
        scores([[[[1, -1.0]], [[7, -2.0]]], [[[9, -0.5]]]]),
        scores(None),
        scores([[6], [9]]),
        {"answers": None},
        {"answers": [{"text": 1}]},
        {"acceptance": {"drafts": 10, "drafted": 20, "accepted": 12, "rates": [NAN, 0.4]}},
        {"acceptance": {"drafts": -1, "drafted": 20, "accepted": 12, "rates": []}},
        {"about": []},
        {"by_kind": 3},
        {"format": 2},
    ],
)
def test_a_damaged_record_is_refused(damage: dict[str, Any], stored: Path) -> None:
    document = {**json.loads(gzip.decompress(stored.read_bytes())), **damage}
    stored.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UsageError) as raised:
        load_reference(stored, PROMPTS)
    assert "--save-reference" in str(raised.value.hint)


def test_no_damaged_byte_of_a_packed_record_crashes(stored: Path) -> None:
    data = stored.read_bytes()
    for at in range(len(data)):
        for part in (data[:at], data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]):
            stored.write_bytes(part)
            try:
                run, _ = load_reference(stored, PROMPTS)
            except UsageError:
                continue
            assert run.scores == RUN.scores


def test_texts_that_are_no_record(tmp_path: Path) -> None:
    path = tmp_path / "record"
    for text in ("", "[]", "[" * 100_000, '"x"', "{}", "\x00"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError):
            load_reference(path, PROMPTS)
    with pytest.raises(UsageError):
        load_reference(tmp_path, PROMPTS)
