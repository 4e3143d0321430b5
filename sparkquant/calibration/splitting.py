"""Long conversations in parts, cut at turn boundaries: each keeps the system message and renders on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from sparkquant.calibration.conversation import Message


class Sized(Protocol):
    """A rendered part; `length` is in tokens."""

    @property
    def length(self) -> int: ...


def steps_of(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """(leading system messages, steps). A step is what must stay together: questions, one answer, its tool results."""
    body = 0
    while body < len(messages) and messages[body]["role"] == "system":
        body += 1
    steps: list[list[Message]] = []
    for message in messages[body:]:
        role = message["role"]
        open_question = bool(steps) and steps[-1][-1]["role"] in ("user", "system")
        if not steps or (role != "tool" and not open_question):
            steps.append([])
        steps[-1].append(message)
    return list(messages[:body]), steps


def part_of(lead: Sequence[Message], steps: Sequence[Sequence[Message]], start: int, stop: int) -> list[Message]:
    """The messages of steps `start` to `stop`. A part that begins without a question repeats the one before it:
    templates refuse a conversation without one, and the answer would be to nothing."""
    question: list[Message] = []
    if all(message["role"] != "user" for message in steps[start]):
        asked = [message for step in steps[:start] for message in step if message["role"] == "user"]
        question = asked[-1:]
    return [*lead, *question, *(message for step in steps[start:stop] for message in step)]


Part = TypeVar("Part", bound=Sized)


def cut(count: int, render: Callable[[int, int], Part], limit: int) -> Iterator[Part]:
    """Cover units 0..count with parts as long as `limit` allows, in order; a single unit may be longer than that.

    The search doubles before it halves, so that the work is in proportion to the parts and not to the conversation.
    """
    start = 0
    while start < count:
        part, stop = render(start, start + 1), start + 1
        step, too_far = 1, 0  # `too_far`: the nearest stop known not to fit, 0 when none is
        while part.length <= limit and stop < count and stop + 1 != too_far:
            trial = (stop + too_far) // 2 if too_far else min(stop + step, count)
            longer = render(start, trial)
            if longer.length <= limit:
                part, stop, step = longer, trial, step * 2
            else:
                too_far = trial
        yield part
        start = stop
