"""Questions to a running server: the same greedy prompts alone, again, and among each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import httpx

from sparkquant.marlin.client import GREEDY, NOT_A_NUMBER, Client, at_once
from sparkquant.marlin.noun import Noun

PROMPTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n",
    "One, two, three, four, five, six,",
    "Water boils at one hundred degrees. When it gets colder than zero degrees, water",
    "import json\n\nwith open('settings.json') as file:\n    settings =",
    "The days of the week are Monday, Tuesday,",
    "A long time ago, in a small village by the sea, there lived a fisherman who",
    "Question: What is 12 + 30?\nAnswer:",
)
"""Distinct, so that no stream is served from another's cache."""
TIME_LIMIT = 120.0
MAX_TOKENS = 96


class Answer(Noun):
    """One completion; `logprobs` and `token_ids` are () where the server sent none. `error` is "" when it answered."""

    prompt: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    finish_reason: str
    error: str


def ask(url: str, *, concurrency: int, prompts: Sequence[str] = PROMPTS, max_tokens: int = MAX_TOKENS) -> list[Answer]:
    """All prompts as text, greedy, so many at a time. A request that fails is an answer with an `error`.

    Text, not token ids: the tokenizer of somebody else's server is not at hand. Raises EnvironmentMissing when no
    server answers.
    """
    with Client(url, limit=TIME_LIMIT) as server, httpx.Client(timeout=TIME_LIMIT, trust_env=False) as http:
        address, model = f"{server.url}/v1/completions", server.model

        def one(index: int) -> Answer:
            return _complete(http, address, model, index, prompts[index], max_tokens)

        return at_once(one, range(len(prompts)), concurrency)


def _complete(http: httpx.Client, address: str, model: str, index: int, prompt: str, max_tokens: int) -> Answer:
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1}
    try:
        reply = http.post(address, json={**body, **GREEDY, "return_token_ids": True})
        if reply.status_code in (400, 422):  # a server that refuses fields it does not know
            reply = http.post(address, json=body)
        if reply.status_code != 200 and NOT_A_NUMBER in reply.text:
            return Answer(prompt=index, text="", token_ids=(), logprobs=(math.nan,), finish_reason="", error="")
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        told = choice.get("logprobs") or {}
        return Answer(
            prompt=index, text=str(choice.get("text") or ""), error="",
            token_ids=tuple(choice.get("token_ids") or ()), logprobs=tuple(told.get("token_logprobs") or ()),
            finish_reason=str(choice.get("finish_reason") or ""),
        )  # fmt: skip
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"[:300]
        return Answer(prompt=index, text="", token_ids=(), logprobs=(), finish_reason="", error=what)
