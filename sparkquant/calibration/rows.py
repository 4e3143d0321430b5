"""From conversations and texts to rows of token ids: one item per row or several rows, never two items in one row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparkquant.calibration.conversation import Conversation, Item, Message, Passage
from sparkquant.calibration.losses import LossFinder, shows_reasoning
from sparkquant.calibration.splitting import cut, part_of, steps_of
from sparkquant.calibration.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `part` of a longer item; `truncated` when even its smallest part was longer than a row."""

    ids: tuple[int, ...]
    thinking: bool = False
    tools: bool = False
    part: bool = False
    truncated: bool = False

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.ids)


class RowMaker:
    """Rows of at most `tokens` ids. Everything raises Unusable when an item cannot be rendered whole."""

    def __init__(self, template: ChatTemplate, tokens: int, *, empty_null: bool = False) -> None:
        self._template = template
        self._tokens = tokens
        self._losses = LossFinder(template, empty_null=empty_null)

    def whole(self, item: Item) -> Row:
        """The item in one row of any length."""
        if isinstance(item, Passage):
            return self._passage(item, item.text)
        return self._conversation(item, item.messages)

    def rows(self, item: Item) -> Iterator[Row]:
        """The item as rows, in its order; made one by one, because mostly the first few are enough."""
        if isinstance(item, Passage):
            lines = item.text.splitlines(keepends=True)
            parts = cut(len(lines), lambda i, j: self._passage(item, "".join(lines[i:j])), self._tokens)
            return self._finished(parts)
        lead, steps = steps_of(item.messages)
        if not steps:
            return self._finished(iter([self._conversation(item, item.messages)]))
        messages = (lead, steps)
        return self._finished(
            cut(len(steps), lambda i, j: self._conversation(item, part_of(*messages, i, j)), self._tokens)
        )

    def _finished(self, parts: Iterator[Row]) -> Iterator[Row]:
        ahead = next(parts, None)
        first = True
        while ahead is not None:
            row, ahead = ahead, next(parts, None)
            several = not (first and ahead is None)
            yield Row(row.ids[: self._tokens], row.thinking, row.tools, several, row.length > self._tokens)
            first = False

    def _passage(self, passage: Passage, text: str) -> Row:
        if passage.user:
            told = passage.conversation(text)
            return self._conversation(told, told.messages)
        return Row(self._template.ids(text, plain=True))

    def _conversation(self, conversation: Conversation, messages: tuple[Message, ...] | list[Message]) -> Row:
        text = self._losses.render(conversation, messages)
        return Row(self._template.ids(text), shows_reasoning(messages, text), bool(conversation.tools))
