"""What a chat template left out of a conversation without a word. A row without its tools or its reasoning would
calibrate for work that the model never does, and nobody would notice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sparkquant.calibration.conversation import Conversation, Message, Reason, Unusable
from sparkquant.calibration.template import ChatTemplate

PROBE = "nonceword"


class LossFinder:
    """Compares what went into a template with what came out. With `empty_null`, content that is null and that the
    template cannot take is rendered as an empty text, which is what most servers make of it."""

    def __init__(self, template: ChatTemplate, *, empty_null: bool = False) -> None:
        self._template = template
        self._empty_null = empty_null
        self._reasoning: bool | None = None

    def render(self, conversation: Conversation, messages: Sequence[Message]) -> str:
        """The text of these messages of the conversation; Unusable when something of them is missing in it."""
        text = self._with_null_content(conversation, messages)
        self._demand_tools(conversation, messages, text)
        for message in messages:
            if not _holds(text, message.get("content") or ""):
                raise Unusable(Reason.CONTENT_LOST, f"text of a {message['role']} message is not in the rendered row")
            for call in message.get("tool_calls", ()):
                self._demand_call(call["function"], text)
        self._demand_reasoning(messages, text)
        return text

    def _with_null_content(self, conversation: Conversation, messages: Sequence[Message]) -> str:
        """Rendered twice when a content is null: a template may raise there, or write the word None."""

        def rendered(told: Sequence[Message]) -> str:
            return self._template.render(told, conversation.tools, conversation.options)

        if all(message.get("content") is not None for message in messages):
            return rendered(messages)
        emptied = rendered([{**m, "content": "" if m.get("content") is None else m["content"]} for m in messages])
        if self._empty_null:
            return emptied
        try:
            text = rendered(messages)
        except Unusable as fault:
            raise Unusable(Reason.NULL_CONTENT, f"content: null makes the template fail: {fault.what}") from None
        if text != emptied:
            raise Unusable(Reason.NULL_CONTENT, "the template prints something where content is null")
        return text

    def _demand_tools(self, conversation: Conversation, messages: Sequence[Message], text: str) -> None:
        if not conversation.tools:
            return
        absent = [t["function"]["name"] for t in conversation.tools if not _holds(text, t["function"]["name"])]
        try:
            ignored = self._template.render(messages, (), conversation.options) == text
        except Unusable:
            ignored = False  # it needs them: it does not ignore them
        if absent or ignored:
            raise Unusable(Reason.TOOLS_LOST, "the tool definitions are not in the rendered row")

    def _demand_call(self, function: Mapping[str, Any], text: str) -> None:
        if not _holds(text, function["name"]) or not all(_holds(text, leaf) for leaf in _texts(function["arguments"])):
            raise Unusable(Reason.TOOL_CALL_LOST, "a tool call or its arguments are not in the rendered row")

    def _demand_reasoning(self, messages: Sequence[Message], text: str) -> None:
        """Reasoning after the last question must appear; that of earlier turns may be left out, as servers do."""
        if not any(message.get("reasoning_content") for message in messages):
            return
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
        lost = any(not _holds(text, message.get("reasoning_content", "")) for message in messages[last:])
        if lost or not self._knows_reasoning():
            raise Unusable(Reason.REASONING_LOST, "the reasoning is not in the rendered row")

    def _knows_reasoning(self) -> bool:
        if self._reasoning is None:
            exchange = (
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hello", "reasoning_content": PROBE},
            )
            try:
                self._reasoning = PROBE in self._template.render(exchange)
            except Unusable:
                self._reasoning = True  # not for this template to say: the rows themselves decide
        return self._reasoning


def shows_reasoning(messages: Sequence[Message], text: str) -> bool:
    """Some reasoning of these messages is in the rendered text."""
    thoughts = (message.get("reasoning_content") for message in messages)
    return any(thought and _holds(text, thought) for thought in thoughts)


def _holds(text: str, wanted: str) -> bool:
    """Whether the text has it: as it is, or escaped as JSON, as Python or by the template's own rules."""
    wanted = wanted.strip()
    if not wanted or wanted in text:
        return True
    loose = _loose_text(text)
    return _loose(wanted) in loose or _loose(json.dumps(wanted)) in loose


def _loose(text: str) -> str:
    """Without white space, quotes and backslashes, which every way of escaping treats differently."""
    return re.sub(r"""\\[nrt]|[\\\s"']""", "", text)


@lru_cache(maxsize=1)
def _loose_text(text: str) -> str:
    return _loose(text)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
