"""What calibration data is made of: conversations and plain texts, and the reasons why one of them serves no row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

Message = Mapping[str, Any]
"""`role`, `content` (text or None), and where they apply `reasoning_content`, `tool_calls`, `tool_call_id`, `name`."""

Option = str | bool | int | float
"""A value that a request passes to the chat template, such as `enable_thinking`."""


class Reason(StrEnum):
    """Why something serves no row. The values are stable: published records count by them."""

    INVALID_JSON = "invalid-json"
    LINE_TOO_LONG = "line-too-long"
    UNREADABLE = "unreadable-file"
    NOT_UTF8 = "not-utf-8"
    NOT_A_CONVERSATION = "not-a-conversation"
    FAILED_REQUEST = "failed-request"
    WRONG_ROLE = "wrong-role"
    NOT_TEXT = "not-only-text"
    BAD_CONTENT = "content-is-no-text"
    BAD_TOOLS = "tools-are-no-functions"
    BAD_TOOL_CALL = "tool-call-is-no-function"
    TOOL_WITHOUT_CALL = "tool-result-without-call"
    LONE_SURROGATE = "lone-surrogate"
    EMPTY = "empty"
    DUPLICATE = "duplicate"
    CONTAINED = "part-of-a-longer-conversation"
    NO_TEMPLATE = "no-chat-template"
    TEMPLATE_FAILS = "template-fails"
    TEMPLATE_TOO_SLOW = "template-too-slow"
    NULL_CONTENT = "template-cannot-take-null-content"
    TOOLS_LOST = "template-loses-tools"
    TOOL_CALL_LOST = "template-loses-tool-calls"
    REASONING_LOST = "template-loses-reasoning"
    CONTENT_LOST = "template-loses-content"


class Unusable(Exception):
    """Raised where a fault is found and turned into `Dropped` where the item is counted; never leaves the package."""

    def __init__(self, reason: Reason, what: str) -> None:
        super().__init__(f"{reason}: {what}")
        self.reason = reason
        self.what = what


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something read or rendered that serves no row. `what` may quote the data: it is for the owner, not published."""

    where: str
    reason: Reason
    what: str


def canonical(value: Any) -> bytes:
    """JSON with sorted keys as UTF-8; Unusable when the text holds half of a surrogate pair."""
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise Unusable(Reason.LONE_SURROGATE, "half of a surrogate pair, which no tokenizer takes") from None
    except RecursionError:
        raise Unusable(Reason.NOT_A_CONVERSATION, "nested too deeply") from None


@dataclass(frozen=True)
class Conversation:
    """One checked conversation. `options` go to the chat template; `where` is `file:line`."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    language: str = ""

    @cached_property
    def digest(self) -> str:
        """sha256 of all that is rendered: two conversations with the same digest give the same row."""
        content = [list(self.messages), list(self.tools), dict(self.options)]
        return hashlib.sha256(canonical(content)).hexdigest()

    @property
    def thinks(self) -> bool:
        """It holds reasoning text."""
        return any(message.get("reasoning_content") for message in self.messages)

    def chain(self) -> list[bytes]:
        """A digest for every beginning of the conversation, without reasoning, call ids and outer white space.

        An agent sends its whole history with each request, without the reasoning of earlier turns: such requests are
        beginnings of one another, and this finds them.
        """
        digests, state = [], b""
        for message in self.messages:
            calls = [call["function"] for call in message.get("tool_calls", ())]
            spoken = [message["role"], (message.get("content") or "").strip(), calls]
            state = hashlib.sha256(state + canonical(spoken)).digest()
            digests.append(state)
        return digests


@dataclass(frozen=True)
class Passage:
    """One plain text: a file, or a field of a table. `user` and `assistant` are set when it is told as a conversation:
    both may hold `{path}` and `{text}`."""

    where: str
    text: str
    path: str = ""
    user: str = ""
    assistant: str = ""
    tags: frozenset[str] = frozenset()
    language: str = ""
    thinks = False
    tools: tuple[Mapping[str, Any], ...] = ()

    @cached_property
    def digest(self) -> str:
        """sha256 of all that is rendered."""
        return hashlib.sha256(canonical([self.text, self.path, self.user, self.assistant])).hexdigest()

    def conversation(self, text: str) -> Conversation:
        """The conversation that tells `text`, a part of this passage."""
        told = [
            {"role": role, "content": words.replace("{path}", self.path).replace("{text}", text)}
            for role, words in (("user", self.user), ("assistant", self.assistant))
        ]
        return Conversation(self.where, tuple(told))


Item = Conversation | Passage
