"""Records of every dialect become the same kind of conversation; odd ones are refused with a reason, never a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.calibration.conversation import Conversation, Passage, Reason, Unusable
from sparkquant.calibration.dialects import item_of

ASK = {"role": "user", "content": "Hi"}
SAY = {"role": "assistant", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHOICES = {"choices": [{"message": SAY, "finish_reason": "stop"}]}


def conversation(record: Any) -> Conversation:
    item = item_of(record, "x:1")
    assert isinstance(item, Conversation)
    return item


def reason(record: Any) -> Reason:
    with pytest.raises(Unusable) as caught:
        item_of(record, "x:1")
    return caught.value.reason


def roles(record: Any) -> list[str]:
    return [message["role"] for message in conversation(record).messages]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASK, SAY]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"request": {"messages": [ASK]}, "response": CHOICES},
        {"request": json.dumps({"messages": [ASK]}), "response": json.dumps(CHOICES)},
        {"request": {"body": {"messages": [ASK]}}, "response": {"status_code": 200, "body": CHOICES}},
        {"request_body": {"messages": [ASK]}, "response_body": CHOICES},
        {"body": {"messages": [ASK]}, "response": {"body": CHOICES}},
        {"messages": [ASK], **CHOICES},
        {"messages": [ASK], "response": CHOICES},
        {"messages": [ASK], "response": "Hello"},
    ],
)
def test_every_dialect_gives_the_same_conversation(record: Any) -> None:
    assert [(m["role"], m["content"]) for m in conversation(record).messages] == [
        ("user", "Hi"),
        ("assistant", "Hello"),
    ]


def test_a_request_without_a_response_is_a_conversation_that_waits() -> None:
    assert roles({"request": {"messages": [ASK]}}) == ["user"]


def test_a_request_keeps_tools_and_template_options() -> None:
    asked = {"messages": [ASK], "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False, "no": [1]}}
    found = conversation({"request": asked, "response": CHOICES})
    assert [tool["function"]["name"] for tool in found.tools] == ["f"]
    assert found.options == {"enable_thinking": False}


def test_completions_become_plain_text() -> None:
    item = item_of({"request": {"prompt": "def f"}, "response": {"choices": [{"text": "(x):"}]}}, "x:1")
    assert isinstance(item, Passage)
    assert item.text == "def f(x):"


def test_reasoning_is_taken_from_its_fields_and_from_think_marks() -> None:
    for answer in (
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
        {"role": "assistant", "content": "A", "reasoning": "R"},
        {"role": "assistant", "content": "<think>\nR\n</think>\n\nA"},
    ):
        message = conversation({"messages": [ASK, answer]}).messages[1]
        assert (message["reasoning_content"], message["content"]) == ("R", "A")


def test_tool_calls_are_parsed_and_their_results_must_belong_to_them() -> None:
    made = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    parsed = conversation({"messages": [ASK, made, result, SAY]}).messages[1]["tool_calls"][0]
    assert parsed["function"] == {"name": "f", "arguments": {"a": 1}}
    assert reason({"messages": [ASK, result]}) is Reason.TOOL_WITHOUT_CALL
    assert reason({"messages": [ASK, made, {**result, "tool_call_id": "c2"}]}) is Reason.TOOL_WITHOUT_CALL
    assert reason({"messages": [ASK, made, ASK, result]}) is Reason.TOOL_WITHOUT_CALL


def test_sharegpt_function_calls_become_tool_calls() -> None:
    turns = [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "Done"},
    ]
    found = conversation({"system": "Be brief.", "conversations": turns, "tools": json.dumps([TOOL])})
    assert [m["role"] for m in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.tools


def test_text_parts_are_joined_and_images_are_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation({"messages": [{"role": "user", "content": parts}, SAY]}).messages[0]["content"] == "a\nb"
    image = [*parts, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    assert reason({"messages": [{"role": "user", "content": image}, SAY]}) is Reason.NOT_TEXT


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ([1, 2], Reason.NOT_A_CONVERSATION),
        ({}, Reason.NOT_A_CONVERSATION),
        ({"messages": "Hi"}, Reason.NOT_A_CONVERSATION),
        ({"messages": ["Hi"]}, Reason.NOT_A_CONVERSATION),
        ({"messages": []}, Reason.EMPTY),
        ({"messages": [{"role": "user", "content": ""}]}, Reason.EMPTY),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, Reason.WRONG_ROLE),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, Reason.WRONG_ROLE),
        ({"messages": [{"content": "Hi"}]}, Reason.WRONG_ROLE),
        ({"messages": [{"role": "user", "content": 7}]}, Reason.BAD_CONTENT),
        ({"messages": [{"role": "user", "content": None}]}, Reason.BAD_CONTENT),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, Reason.BAD_CONTENT),
        ({"messages": [{"role": "user", "content": "\ud800"}, SAY]}, Reason.LONE_SURROGATE),
        ({"messages": [ASK, SAY], "tools": [{"type": "function"}]}, Reason.BAD_TOOLS),
        ({"messages": [ASK, SAY], "tools": "{"}, Reason.BAD_TOOLS),
        ({"messages": [ASK, SAY], "tools": {"f": 1}}, Reason.BAD_TOOLS),
        ({"messages": [ASK, {**SAY, "tool_calls": [{"function": {}}]}]}, Reason.BAD_TOOL_CALL),
        ({"messages": [ASK, {**SAY, "tool_calls": "f"}]}, Reason.BAD_TOOL_CALL),
        (
            {"messages": [ASK, {**SAY, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            Reason.BAD_TOOL_CALL,
        ),
        (
            {"messages": [ASK, {**SAY, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            Reason.BAD_TOOL_CALL,
        ),
        ({"request": {"messages": [ASK]}, "response": {"error": {"message": "no"}}}, Reason.FAILED_REQUEST),
        ({"request": {"messages": [ASK]}, "response": {"status_code": 500, "body": "no"}}, Reason.FAILED_REQUEST),
        ({"request": {"messages": [ASK]}, "response": {"choices": []}}, Reason.FAILED_REQUEST),
        ({"request": {"messages": [ASK]}, "response": [{"choices": [{"delta": {}}]}]}, Reason.NOT_A_CONVERSATION),
        ({"request": {"messages": [ASK]}, "response": {"choices": [{"delta": {}}]}}, Reason.NOT_A_CONVERSATION),
        ({"request": "GET /", "response": {}}, Reason.NOT_A_CONVERSATION),
        ({"conversations": [{"from": "wizard", "value": "Hi"}]}, Reason.WRONG_ROLE),
        ({"conversations": [{"from": {}, "value": "Hi"}]}, Reason.WRONG_ROLE),
        ({"conversations": ["Hi"]}, Reason.NOT_A_CONVERSATION),
        ({"text": "  "}, Reason.EMPTY),
    ],
)
def test_odd_records_have_a_reason(record: Any, expected: Reason) -> None:
    assert reason(record) is expected


KEYS = st.sampled_from(
    ["messages", "conversations", "request", "response", "choices", "message", "role", "content", "from", "value",
     "tools", "tool_calls", "function", "name", "arguments", "body", "error", "text", "prompt", "type"]
)  # fmt: skip
WORDS = st.sampled_from(["user", "assistant", "tool", "system", "human", "gpt", "text", "{}", "[", "", "\ud800", "f"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_no_json_value_crashes_the_reader(record: Any) -> None:
    try:
        item = item_of(record, "x:1")
    except Unusable:
        return
    assert len(item.digest) == 64
