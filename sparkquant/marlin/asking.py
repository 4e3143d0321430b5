"""Questions to a running server: the same greedy prompts alone, again, and among each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sparkquant.marlin import replies
from sparkquant.marlin.client import GREEDY, Client, at_once
from sparkquant.marlin.noun import Noun
from sparkquant.marlin.replies import Completion

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
REFUSED = ("HTTP 400", "HTTP 422")


class Answer(Noun):
    """One completion; `logprobs` and `token_ids` are () where the server sent none. `error` is "" when it answered."""

    prompt: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    finish_reason: str
    error: str


def ask(
    url: str, *, concurrency: int, prompts: Sequence[str] = PROMPTS, max_tokens: int = MAX_TOKENS,
    limit: float = TIME_LIMIT,
) -> list[Answer]:  # fmt: skip
    """All prompts as text, greedy, so many at a time. A request that fails is an answer with an `error`.

    Text, not token ids: the tokenizer of somebody else's server is not at hand. Raises EnvironmentMissing when no
    server answers.
    """
    with Client(url, limit=limit) as server:
        server.model  # noqa: B018  asked for once, before several threads do

        def one(index: int) -> Answer:
            return _complete(server, index, prompts[index], max_tokens)

        return at_once(one, range(len(prompts)), concurrency)


def _complete(server: Client, index: int, prompt: str, max_tokens: int) -> Answer:
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "logprobs": 1}
    answer, error = server.ask(prompt, {**body, **GREEDY, "return_token_ids": True})
    if error.startswith(REFUSED):  # a server that refuses fields it does not know
        answer, error = server.ask(prompt, body)
    if error.startswith(replies.NAN):
        return Answer(prompt=index, text="", token_ids=(), logprobs=(math.nan,), finish_reason="", error="")
    try:
        found = Completion(error=error) if error else replies.completion(answer["choices"][0], 0.0, 0)
    except replies.MALFORMED as wrong:
        found = Completion(error=replies.malformed(wrong))
    return Answer(
        prompt=index, text=found.text, error=found.error, token_ids=found.token_ids, logprobs=found.logprobs,
        finish_reason=found.finish_reason,
    )  # fmt: skip
