"""A real checkpoint with a real tokenizer, copies of it with other chat templates, and files to read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from sparkquant.calibration.template import ChatTemplate

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hybrid-5m"

WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {}}}


@pytest.fixture(scope="session")
def model() -> Path:
    """The example checkpoint; its template knows tools and reasoning."""
    return EXAMPLE


@pytest.fixture(scope="session")
def template(model: Path) -> ChatTemplate:
    return ChatTemplate.open(model)


@pytest.fixture
def with_template(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the example checkpoint (weights linked) with this chat template."""

    def make(text: str) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        for entry in EXAMPLE.iterdir():
            if entry.suffix == ".safetensors":
                (folder / entry.name).symlink_to(entry)
            else:
                shutil.copy(entry, folder / entry.name)
        (folder / "chat_template.jinja").write_text(text)
        return folder

    return make


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    """One record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat(number: int, *, reasoning: str = "", turns: int = 1, words: int = 12) -> dict[str, Any]:
    """A small conversation; different numbers give different ones."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {number}.{turn}: " + "why is it so " * words})
        answer: dict[str, Any] = {"role": "assistant", "content": f"Answer {number}.{turn} " + "because it is " * words}
        if reasoning:
            answer["reasoning_content"] = f"{reasoning} {number}.{turn}"
        messages.append(answer)
    return {"messages": messages, "thinking": bool(reasoning)}


def agent(number: int, steps: int = 3) -> dict[str, Any]:
    """A conversation with one question and many tool calls."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": f"Task {number}"},
    ]
    for step in range(steps):
        call = {"id": f"c{step}", "type": "function"}
        call["function"] = {"name": "weather", "arguments": json.dumps({"city": f'City {number}-{step} "quoted"\n'})}  # type: ignore[assignment]
        messages += [
            {"role": "assistant", "content": None, "reasoning_content": f"Look up {step}", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{step}", "content": f"rain {number}-{step}"},
        ]
    messages.append({"role": "assistant", "content": f"Done {number}"})
    return {"messages": messages, "tools": [WEATHER], "thinking": True}
