"""Chat messages as servers and data sets write them, checked and brought to one form for the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from sparkquant.calibration.conversation import Message, Reason, Unusable

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles that are understood, and how templates call them."""

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})

_INLINE_REASONING = re.compile(r"\s*<think>\s*(.*?)\s*</think>\s*", re.DOTALL)


def messages_of(raw: Any) -> tuple[Message, ...]:
    """The checked messages; Unusable with the reason at the first fault."""
    if not isinstance(raw, list):
        raise Unusable(Reason.NOT_A_CONVERSATION, f"messages are {type(raw).__name__}, not a list")
    messages = tuple(_message(entry, f"message {number}") for number, entry in enumerate(raw, 1))
    _pair_tools(messages)
    if not any(message.get("content") or message.get("tool_calls") for message in messages):
        raise Unusable(Reason.EMPTY, "no message has any text")
    return messages


def _message(raw: Any, where: str) -> Message:
    if not isinstance(raw, Mapping):
        raise Unusable(Reason.NOT_A_CONVERSATION, f"{where} is {type(raw).__name__}, not an object")
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Unusable(Reason.WRONG_ROLE, f"{where} has the role {role!r}; known: {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": ROLES[role], "content": _text(raw.get("content"), where)}
    if role == "assistant":
        _add_assistant_fields(message, raw, where)
    elif message["content"] is None:
        raise Unusable(Reason.BAD_CONTENT, f"{where} ({role}) has no content")
    if role == "tool":
        message |= {key: raw[key] for key in ("tool_call_id", "name") if isinstance(raw.get(key), str)}
    return message


def _add_assistant_fields(message: dict[str, Any], raw: Mapping[str, Any], where: str) -> None:
    reasoning = _text(raw.get("reasoning_content") or raw.get("reasoning"), where)
    if not reasoning and message["content"] and (inline := _INLINE_REASONING.match(message["content"])):
        reasoning, message["content"] = inline[1], message["content"][inline.end() :]
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = raw.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise Unusable(Reason.BAD_TOOL_CALL, f"{where}: tool_calls are {type(calls).__name__}, not a list")
    if calls:
        message["tool_calls"] = [_tool_call(call, where) for call in calls]


def _text(content: Any, where: str) -> str | None:
    """Text as it is; a list of text parts joined by line ends, as servers do for templates that take text only."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unusable(Reason.BAD_CONTENT, f"{where}: content is {type(content).__name__}, not text")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in TEXT_PARTS:
            raise Unusable(Reason.NOT_TEXT, f"{where} holds a part of type {str(kind)[:40]!r}")
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise Unusable(Reason.BAD_CONTENT, f"{where}: a text part without text")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Unusable(Reason.BAD_TOOL_CALL, f"{where}: a tool call without a function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Servers parse the text before they fill the template, and templates iterate over the result.
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise Unusable(Reason.BAD_TOOL_CALL, f"{where}: tool-call arguments are not JSON") from None
    if not isinstance(arguments, Mapping):
        raise Unusable(Reason.BAD_TOOL_CALL, f"{where}: tool-call arguments are not a JSON object")
    call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    if isinstance(raw.get("id"), str):
        call["id"] = raw["id"]
    return call


def _pair_tools(messages: tuple[Message, ...]) -> None:
    open_calls: list[str | None] | None = None
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant" and "tool_calls" in message:
            open_calls = [call.get("id") for call in message["tool_calls"]]
        elif message["role"] != "tool":
            open_calls = None
        elif not open_calls:
            raise Unusable(Reason.TOOL_WITHOUT_CALL, f"message {number} answers no tool call")
        else:
            named = message.get("tool_call_id")
            known = [call for call in open_calls if call is not None]
            if named is not None and known and named not in known:
                raise Unusable(Reason.TOOL_WITHOUT_CALL, f"message {number} answers a call that was not made")


def tools_of(raw: Any) -> tuple[Mapping[str, Any], ...]:
    """Function tools in the nested form that templates expect."""
    if isinstance(raw, str) and raw.strip():
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):
            raise Unusable(Reason.BAD_TOOLS, "tools are text that is not JSON") from None
    if not raw:
        return ()
    if not isinstance(raw, list):
        raise Unusable(Reason.BAD_TOOLS, f"tools are {type(raw).__name__}, not a list")
    return tuple(_tools(raw))


def _tools(raw: list[Any]) -> Iterator[Mapping[str, Any]]:
    for number, tool in enumerate(raw, 1):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise Unusable(Reason.BAD_TOOLS, f"tool {number} is no function with a name")
        yield {"type": "function", "function": dict(function)}
