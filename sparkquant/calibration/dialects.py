"""Records as they lie in files, told apart by their keys: chat messages, ShareGPT, request logs, plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparkquant.calibration.conversation import Conversation, Item, Option, Passage, Reason, Unusable
from sparkquant.calibration.messages import messages_of, tools_of

REQUEST_KEYS = ("request", "request_body", "req")
RESPONSE_KEYS = ("response", "response_body", "resp")
WRAPPERS = ("body", "json", "data", "payload")
"""Keys under which loggers and batch files put the real body."""

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool", "function_call": "function_call",
}  # fmt: skip


def item_of(record: Any, where: str) -> Item:
    """The conversation or text of one record; Unusable with the reason when there is none."""
    if not isinstance(record, Mapping):
        raise Unusable(Reason.NOT_A_CONVERSATION, f"the record is {type(record).__name__}, not an object")
    if isinstance(record.get("conversations"), list):
        return _sharegpt(record, where)
    if isinstance(record.get("messages"), list) and not any(key in record for key in (*RESPONSE_KEYS, "choices")):
        return _chat(record, record["messages"], record, where)
    if any(key in record for key in (*REQUEST_KEYS, "choices")) or "messages" in record or "body" in record:
        return _logged(record, where)
    if isinstance(record.get("text"), str):
        return passage_of(record["text"], record, where)
    raise Unusable(Reason.NOT_A_CONVERSATION, "none of messages, conversations, request and text is there")


def passage_of(text: str, record: Mapping[str, Any], where: str) -> Passage:
    """A plain text with the tags of its record."""
    if not text.strip():
        raise Unusable(Reason.EMPTY, "no text")
    tags, language = _labels(record)
    return Passage(where, text, tags=tags, language=language)


def _chat(record: Mapping[str, Any], messages: list[Any], request: Mapping[str, Any], where: str) -> Conversation:
    tags, language = _labels(record)
    conversation = Conversation(
        where,
        messages_of(messages),
        tools_of(request.get("tools")),
        _options(record) | _options(request),
        tags,
        language,
    )
    conversation.digest  # noqa: B018  # text that cannot be encoded shows here, with its line
    return conversation


def _labels(record: Mapping[str, Any]) -> tuple[frozenset[str], str]:
    tags = record.get("tags")
    language = record.get("language") or record.get("lang")
    found = frozenset(tag for tag in tags if isinstance(tag, str)) if isinstance(tags, list) else frozenset()
    return found, language if isinstance(language, str) else ""


def _options(record: Mapping[str, Any]) -> dict[str, Option]:
    """What the request asked of the template; `thinking` is short for `enable_thinking`."""
    options: dict[str, Option] = {}
    if isinstance(record.get("thinking"), bool):
        options["enable_thinking"] = record["thinking"]
    extra = record.get("extra_body")
    for holder in (extra if isinstance(extra, Mapping) else {}, record):
        asked = holder.get("chat_template_kwargs")
        if isinstance(asked, Mapping):
            options |= {
                key: value
                for key, value in asked.items()
                if isinstance(key, str) and key.isidentifier() and isinstance(value, str | bool | int | float)
            }
    return options


def _sharegpt(record: Mapping[str, Any], where: str) -> Conversation:
    messages: list[dict[str, Any]] = []
    if isinstance(record.get("system"), str) and record["system"].strip():
        messages.append({"role": "system", "content": record["system"]})
    for number, turn in enumerate(record["conversations"], 1):
        if not isinstance(turn, Mapping):
            raise Unusable(Reason.NOT_A_CONVERSATION, f"turn {number} is {type(turn).__name__}, not an object")
        speaker = turn.get("from")
        role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise Unusable(Reason.WRONG_ROLE, f"turn {number} is from {speaker!r}")
        if role == "function_call":
            messages.append({"role": "assistant", "content": None, "tool_calls": [_json(turn.get("value"))]})
        else:
            messages.append({"role": role, "content": turn.get("value")})
    return _chat(record, messages, record, where)


def _logged(record: Mapping[str, Any], where: str) -> Item:
    request = _body(next((record[key] for key in REQUEST_KEYS if key in record), record))
    answered = next((record[key] for key in RESPONSE_KEYS if key in record), None)
    if answered is None and "choices" in record:
        answered = record
    answer = _answer(answered)
    if isinstance(request.get("prompt"), str) and "messages" not in request:
        return passage_of(request["prompt"] + (answer.get("content") or "" if answer else ""), record, where)
    if not isinstance(request.get("messages"), list):
        raise Unusable(Reason.NOT_A_CONVERSATION, "the request holds no messages")
    return _chat(record, request["messages"] + ([answer] if answer else []), request, where)


def _body(value: Any) -> Mapping[str, Any]:
    body = _json(value)
    if not isinstance(body, Mapping):
        raise Unusable(Reason.NOT_A_CONVERSATION, f"a request or response is {type(body).__name__}, not an object")
    if not any(key in body for key in ("messages", "prompt", "choices", "error")):
        inner = next((body[key] for key in WRAPPERS if key in body), None)
        if inner is not None:
            _refuse_failure(body)
            return _body(inner)
    return body


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Unusable(Reason.NOT_A_CONVERSATION, "a text that should hold JSON does not") from None


def _refuse_failure(body: Mapping[str, Any]) -> None:
    status = body.get("status_code", body.get("status"))
    if body.get("error") or (type(status) is int and status >= 400):
        raise Unusable(Reason.FAILED_REQUEST, f"the server answered with an error ({status or 'no status'})")


def _answer(answered: Any) -> dict[str, Any] | None:
    """The assistant message of a response; None when nothing was logged."""
    if answered is None:
        return None
    if isinstance(answered, str) and not answered.lstrip().startswith("{"):
        return {"role": "assistant", "content": answered}
    if isinstance(answered, list):
        raise Unusable(Reason.NOT_A_CONVERSATION, "the response is a stream of chunks: log whole responses")
    body = _body(answered)
    _refuse_failure(body)
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        raise Unusable(Reason.FAILED_REQUEST, "the response holds no choices")
    if isinstance(choice.get("text"), str):
        return {"role": "assistant", "content": choice["text"]}
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise Unusable(Reason.NOT_A_CONVERSATION, "the response holds no message: log whole responses, not chunks")
    return {"role": "assistant", **message}
