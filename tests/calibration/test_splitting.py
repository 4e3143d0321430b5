"""Parts cover every turn once, in order, and each stands on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sparkquant.calibration.conversation import Conversation
from sparkquant.calibration.dialects import item_of
from sparkquant.calibration.rows import RowMaker
from sparkquant.calibration.splitting import cut, part_of, steps_of
from sparkquant.calibration.template import ChatTemplate
from tests.calibration.conftest import agent, chat


@dataclass(frozen=True)
class Span:
    start: int
    stop: int
    length: int


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 80))
def test_cut_covers_all_units_in_order_and_as_long_as_fits(sizes: list[int], limit: int) -> None:
    parts = list(cut(len(sizes), lambda i, j: Span(i, j, sum(sizes[i:j])), limit))
    assert [unit for part in parts for unit in range(part.start, part.stop)] == list(range(len(sizes)))
    for part in parts:
        assert part.length <= limit or part.stop == part.start + 1
        longer = sum(sizes[part.start : part.stop + 1])
        assert part.stop == len(sizes) or longer > limit or part.length > limit


TURN = st.sampled_from(["user", "answer", "tools", "system"])


@given(st.booleans(), st.lists(TURN, min_size=1, max_size=12), st.data())
def test_parts_keep_the_system_message_and_a_question(system: bool, turns: list[str], data: st.DataObject) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}] if system else []
    for turn in turns:
        if turn == "tools":
            messages += [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "result"}]
        else:
            messages.append({"role": {"answer": "assistant"}.get(turn, turn), "content": turn})
    messages = [{**message, "number": number} for number, message in enumerate(messages)]
    lead, steps = steps_of(messages)
    assert [m for part in (lead, *steps) for m in part] == messages
    for step in steps:
        assert step[0]["role"] != "tool" or step is steps[0]
    if steps:
        start = data.draw(st.integers(0, len(steps) - 1))
        part = part_of(lead, steps, start, len(steps))
        assert part[: len(lead)] == lead
        asked = any(m["role"] == "user" for step in steps[: start + 1] for m in step)
        assert not asked or any(m["role"] == "user" for m in part)


def conversation(record: dict[str, Any]) -> Conversation:
    item = item_of(record, "x:1")
    assert isinstance(item, Conversation)
    return item


def test_an_agents_long_work_is_cut_between_its_steps(template: ChatTemplate) -> None:
    item = conversation(agent(1, steps=20))
    rows = list(RowMaker(template, 400).rows(item))
    texts = [template.decode(row.ids) for row in rows]
    assert len(rows) > 2
    assert all(row.part and row.tools and not row.truncated and row.length <= 400 for row in rows)
    for text in texts:
        assert text.startswith("<|im_start|>system\nYou are an agent.\n\nTools")
        assert "Task 1<|im_end|>" in text
    for step in range(20):
        assert sum(f"rain 1-{step}<" in text for text in texts) == 1


def test_a_conversation_that_fits_is_one_row(template: ChatTemplate) -> None:
    item = conversation(chat(1, turns=3))
    (row,) = RowMaker(template, 4096).rows(item)
    assert not row.part
    assert not row.truncated
    assert template.decode(row.ids) == template.render(item.messages, (), item.options)


def test_a_turn_longer_than_a_row_is_cut_and_counted(template: ChatTemplate) -> None:
    (row,) = RowMaker(template, 64).rows(conversation(chat(1, words=100)))
    assert row.truncated
    assert row.length == 64


@given(st.integers(1, 6), st.integers(1, 30), st.integers(60, 700))
def test_parts_of_real_conversations_hold_every_message_or_say_that_they_are_cut(
    template: ChatTemplate, turns: int, words: int, tokens: int
) -> None:
    item = conversation(chat(7, turns=turns, words=words))
    rows = list(RowMaker(template, tokens).rows(item))
    texts = [template.decode(row.ids) for row in rows]
    assert all(row.length <= tokens for row in rows)
    assert all(row.part == (len(rows) > 1) for row in rows)
    if not any(row.truncated for row in rows):
        for message in item.messages:
            assert sum(message["content"].strip() in text for text in texts) >= 1
