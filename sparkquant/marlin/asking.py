"""Questions to a running server: the same greedy prompts alone, again, and among each other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from sparkquant.errors import EnvironmentMissing
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


def served_model(url: str, client: httpx.Client) -> str:
    """The name of the model behind a URL. Raises EnvironmentMissing when no server answers there."""
    try:
        answer = client.get(f"{url}/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise EnvironmentMissing(
            f"{url}: no OpenAI-compatible server answers ({type(error).__name__})",
            hint="pass the address without /v1, like http://localhost:8000",
        ) from None


def ask(url: str, *, concurrency: int, prompts: Sequence[str] = PROMPTS, max_tokens: int = MAX_TOKENS) -> list[Answer]:
    """All prompts, greedy, so many at a time. A request that fails is an answer with an `error`."""
    base = url.rstrip("/").removesuffix("/v1")
    with httpx.Client(timeout=TIME_LIMIT) as client:
        model = served_model(base, client)

        def one(index: int) -> Answer:
            return _complete(client, base, model, index, prompts[index], max_tokens)

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, range(len(prompts))))


def _complete(client: httpx.Client, base: str, model: str, index: int, prompt: str, max_tokens: int) -> Answer:
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1}
    try:
        reply = client.post(f"{base}/v1/completions", json={**body, "return_token_ids": True})
        if reply.status_code == 400:  # a server that refuses fields it does not know
            reply = client.post(f"{base}/v1/completions", json=body)
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
