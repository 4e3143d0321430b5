"""Questions to an OpenAI-compatible server in token ids: answers, log probabilities of prompts, streams, metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from sparkquant.errors import EnvironmentMissing, UsageError
from sparkquant.marlin import replies
from sparkquant.marlin.metrics import Metrics, parse_metrics
from sparkquant.marlin.numbers import Position
from sparkquant.marlin.replies import Completion

TIME_LIMIT = 600.0
"""Seconds for one answer."""
PAGE_LIMIT = 30.0
"""Seconds for a page that no model computes."""
GREEDY: Mapping[str, Any] = {
    "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0,
}  # fmt: skip
"""Spelled out: a server takes what is missing from the checkpoint's generation_config.json."""
PATIENCE = 2
"""Requests in a row that may run out of time; a server that hangs is not asked all the others, too."""
KEY = "VLLM_API_KEY"
"""vLLM wants it from clients when it finds it in its own environment, which servers of ours inherit."""

Given = TypeVar("Given")
Found = TypeVar("Found")


class Client:
    """A server at a URL (with or without `/v1`). A request that fails gives an answer with an `error`.

    limit  seconds for one answer, however it trickles in. Raises UsageError for what is no address.
    """

    def __init__(self, url: str, *, model: str = "", limit: float = TIME_LIMIT) -> None:
        self.url = address_of(url)
        self.limit = limit
        headroom = httpx.Limits(max_connections=64)
        key = os.environ.get(KEY, "")
        self._http = httpx.Client(
            timeout=httpx.Timeout(limit, connect=min(limit, 10.0)), limits=headroom, trust_env=False,
            verify=self.url.startswith("https"),  # certificates take longer to load than a page, and http has none
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )  # fmt: skip
        self._model = model
        self._silent = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """What the server calls its model. Raises EnvironmentMissing when no server answers."""
        if not self._model:
            try:
                reply = self._get("/v1/models")
                reply.raise_for_status()
                self._model = str(reply.json()["data"][0]["id"])
            except replies.MALFORMED as error:
                raise EnvironmentMissing(
                    f"{self.url}: no OpenAI-compatible server answers ({replies.refusal(error)})",
                    hint=f"pass the address, like http://localhost:8000; a key goes into {KEY}",
                ) from None
        return self._model

    def version(self) -> str:
        """As `/version` says; "" where there is no such page."""
        try:
            return str(self._get("/version").json()["version"])
        except replies.MALFORMED:
            return ""

    def metrics(self) -> Metrics:
        """The counters now; empty where the server has none."""
        try:
            reply = self._get("/metrics")
            return parse_metrics(reply.text if reply.status_code == 200 else "")
        except replies.MALFORMED:
            return parse_metrics("")

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """A greedy answer with the log probabilities of its tokens."""
        body = {
            **GREEDY, "max_tokens": max_tokens, "logprobs": 1, "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        began = time.monotonic()
        answer, error = self.ask(prompt, body)
        try:
            if not error:
                return replies.completion(answer["choices"][0], time.monotonic() - began, len(prompt))
        except replies.MALFORMED as wrong:
            error = replies.malformed(wrong)
        return Completion(error=error, seconds=time.monotonic() - began)

    def score(self, row: Sequence[int], top: int) -> tuple[list[Position], str]:
        """What the model gives every token of a row after the ones before it, and why not ("" when it does).

        Position i speaks of row[i + 1], and holds the `top` most likely tokens and the one that stands there.
        """
        answer, error = self.ask(row, {**GREEDY, "max_tokens": 1, "prompt_logprobs": top})
        if error:
            return [], error
        try:
            given = answer["choices"][0].get("prompt_logprobs") or answer.get("prompt_logprobs")
            if not isinstance(given, list) or len(given) != len(row):
                return [], "the server sends no log probabilities of prompts"
            return replies.positions(given, row)
        except replies.MALFORMED as wrong:
            return [], replies.malformed(wrong)

    def stream(self, prompt: Sequence[int], max_tokens: int, *, salt: str = "") -> Completion:
        """A greedy answer as it comes, timed at its first and last token. A new `salt` keeps it out of the cache."""
        body = {
            "model": self.model, "prompt": list(prompt), **GREEDY, "max_tokens": max_tokens, "stream": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        if salt:
            body["cache_salt"] = salt
        began = time.monotonic()
        if self._silent >= PATIENCE:
            return Completion(error=self._given_up())
        try:
            with self._http.stream("POST", f"{self.url}/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    error = replies.told(replies.whole(reply, began + self.limit))
                    return Completion(error=error, seconds=time.monotonic() - began)
                events = replies.events(replies.lines(reply.iter_bytes(), began + self.limit))
                answer = replies.streamed(events, began, len(prompt))
            self._silent = 0
            return answer
        except replies.MALFORMED as error:
            self._silent += isinstance(error, httpx.TimeoutException)
            return Completion(error=replies.failure(error), seconds=time.monotonic() - began)

    def _get(self, page: str) -> httpx.Response:
        limit = min(self.limit, PAGE_LIMIT)
        with self._http.stream("GET", f"{self.url}{page}", timeout=limit) as reply:
            return replies.whole(reply, time.monotonic() + limit)

    def ask(self, prompt: Sequence[int] | str, body: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """(an answer with choices, why not)"""
        document = {"model": self.model, "prompt": prompt if isinstance(prompt, str) else list(prompt), **body}
        if self._silent >= PATIENCE:
            return {}, self._given_up()
        try:
            with self._http.stream("POST", f"{self.url}/v1/completions", json=document) as coming:
                reply = replies.whole(coming, time.monotonic() + self.limit)
            self._silent = 0
            if reply.status_code != 200:
                return {}, replies.told(reply)
            answer = reply.json()
            if not isinstance(answer, dict) or not answer.get("choices"):
                return {}, "an answer without choices"
            return answer, ""
        except replies.MALFORMED as error:
            self._silent += isinstance(error, httpx.TimeoutException)
            return {}, replies.failure(error)

    def _given_up(self) -> str:
        return f"not asked: {PATIENCE} requests before it had no answer within {self.limit:g} s"


def address_of(url: str) -> str:
    """The base address of a server. Raises UsageError for what is none."""
    text = url.strip()
    hint = "pass the address, like http://localhost:8000"
    try:
        parts = httpx.URL(text)
    except (httpx.InvalidURL, ValueError) as error:
        raise UsageError(f"{text[:200]!r} is no address: {error}", hint=hint) from None
    sound = parts.scheme in ("http", "https") and parts.host and 0 < (parts.port or 80) < 1 << 16
    if not sound or any(letter.isspace() for letter in text):
        raise UsageError(f"{text[:200]!r} is no address of a server", hint=hint)
    if parts.query or parts.fragment:
        raise UsageError(f"{text[:200]!r} is an address of a page, not of a server", hint=hint)
    bare = text.rstrip("/")
    for page in ("/completions", "/chat", "/models", "/v1"):
        bare = bare.removesuffix(page).rstrip("/")
    return bare


def at_once(work: Callable[[Given], Found], given: Sequence[Given], concurrency: int) -> list[Found]:
    """`work` on each of them, so many at a time, results in their order."""
    if concurrency == 1:
        return [work(item) for item in given]
    with ThreadPoolExecutor(concurrency, thread_name_prefix="request") as pool:
        return list(pool.map(work, given))
