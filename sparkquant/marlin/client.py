"""Questions to an OpenAI-compatible server in token ids: answers, log probabilities of prompts, streams, metrics."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from sparkquant.errors import EnvironmentMissing
from sparkquant.marlin.metrics import Metrics, parse_metrics
from sparkquant.marlin.noun import Noun

TIME_LIMIT = 600.0
"""Seconds for one answer."""
GREEDY: Mapping[str, Any] = {
    "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0,
}  # fmt: skip
"""Spelled out: a server takes what is missing from the checkpoint's generation_config.json."""
NOT_A_NUMBER = "JSON compliant"
"""In the error of a server that was about to send NaN."""

Position = Mapping[int, float]
"""Log probabilities (nats) of some tokens at one position: the most likely ones, and the one that stands there."""

Given = TypeVar("Given")
Found = TypeVar("Found")


class Completion(Noun):
    """One greedy answer. `error` is "" when it came; `logprobs` are the chosen tokens'.

    first, seconds  time to the first token (streamed answers only, otherwise None) and to the last, from the request
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    finish_reason: str = ""
    error: str = ""
    first: float | None = None
    seconds: float = 0.0
    prompt_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Length of the answer."""
        return len(self.token_ids)


class Client:
    """A server at a URL (with or without `/v1`). A request that fails gives an answer with an `error`."""

    def __init__(self, url: str, *, model: str = "", limit: float = TIME_LIMIT) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headroom = httpx.Limits(max_connections=64)
        self._http = httpx.Client(timeout=httpx.Timeout(limit, connect=10.0), limits=headroom, trust_env=False)
        self._model = model

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """What the server calls its model. Raises EnvironmentMissing when no server answers."""
        if not self._model:
            try:
                reply = self._http.get(f"{self.url}/v1/models")
                reply.raise_for_status()
                self._model = str(reply.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
                raise EnvironmentMissing(
                    f"{self.url}: no OpenAI-compatible server answers ({type(error).__name__})",
                    hint="pass the address, like http://localhost:8000",
                ) from None
        return self._model

    def version(self) -> str:
        """As `/version` says; "" where there is no such page."""
        try:
            return str(self._http.get(f"{self.url}/version").json()["version"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ""

    def metrics(self) -> Metrics:
        """The counters now; empty where the server has none."""
        try:
            reply = self._http.get(f"{self.url}/metrics")
            return parse_metrics(reply.text if reply.status_code == 200 else "")
        except httpx.HTTPError:
            return parse_metrics("")

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """A greedy answer with the log probabilities of its tokens."""
        body = {"max_tokens": max_tokens, "logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
        began = time.monotonic()
        answer, error = self._ask(prompt, body)
        if error:
            return Completion(error=error, seconds=time.monotonic() - began)
        choice = answer["choices"][0]
        told = choice.get("logprobs") or {}
        return Completion(
            text=str(choice.get("text") or ""), token_ids=_ids(choice, told),
            logprobs=tuple(_number(value) for value in told.get("token_logprobs") or ()),
            finish_reason=str(choice.get("finish_reason") or ""), seconds=time.monotonic() - began,
            prompt_tokens=len(prompt),
        )  # fmt: skip

    def score(self, row: Sequence[int], top: int) -> tuple[list[Position], str]:
        """What the model gives every token of a row after the ones before it, and why not ("" when it does).

        Position i speaks of row[i + 1], and holds the `top` most likely tokens and the one that stands there.
        """
        answer, error = self._ask(row, {"max_tokens": 1, "prompt_logprobs": top})
        if error:
            return [], error
        given = answer["choices"][0].get("prompt_logprobs") or answer.get("prompt_logprobs")
        if not isinstance(given, list) or len(given) != len(row):
            return [], "the server sends no log probabilities of prompts"
        positions: list[Position] = []
        for number, entry in enumerate(given[1:], 1):
            values = {int(token): _number(value["logprob"]) for token, value in (entry or {}).items()}
            if not values or any(value is None or math.isnan(value) for value in values.values()):
                return [], f"log probabilities at position {number} are no numbers"
            positions.append({token: value for token, value in values.items() if value is not None})
        return positions, ""

    def stream(self, prompt: Sequence[int], max_tokens: int, *, salt: str = "") -> Completion:
        """A greedy answer as it comes, timed at its first and last token. A new `salt` keeps it out of the cache."""
        body = {
            "model": self.model, "prompt": list(prompt), **GREEDY, "max_tokens": max_tokens, "stream": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        if salt:
            body["cache_salt"] = salt
        began = time.monotonic()
        first: float | None = None
        last = began
        ids: list[int] = []
        text: list[str] = []
        reason, count = "", 0
        try:
            with self._http.stream("POST", f"{self.url}/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    return Completion(error=_told(reply), seconds=time.monotonic() - began)
                for event in _events(reply.iter_lines()):
                    if "error" in event:
                        return Completion(error=str(event["error"])[:300], seconds=time.monotonic() - began)
                    count = (event.get("usage") or {}).get("completion_tokens") or count
                    for choice in event.get("choices") or ():
                        piece = choice.get("token_ids") or ()
                        if piece or choice.get("text"):
                            last = time.monotonic()
                            first = first if first is not None else last
                        ids += piece
                        text.append(str(choice.get("text") or ""))
                        reason = str(choice.get("finish_reason") or reason)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            return Completion(error=_failure(error), seconds=time.monotonic() - began)
        if count and not ids:
            ids = [-1] * count  # the server counts its tokens and does not name them
        return Completion(
            text="".join(text), token_ids=tuple(ids), finish_reason=reason,
            error="" if reason else "the stream broke off",
            first=None if first is None else first - began, seconds=last - began, prompt_tokens=len(prompt),
        )  # fmt: skip

    def _ask(self, prompt: Sequence[int], body: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """(answer, why not)"""
        whole = {"model": self.model, "prompt": list(prompt), **GREEDY, **body}
        try:
            reply = self._http.post(f"{self.url}/v1/completions", json=whole)
            if reply.status_code != 200:
                return {}, _told(reply)
            answer = reply.json()
            if not isinstance(answer, dict) or not answer.get("choices"):
                return {}, "an answer without choices"
            return answer, ""
        except (httpx.HTTPError, ValueError, TypeError) as error:
            return {}, _failure(error)


def at_once(work: Any, given: Sequence[Given], concurrency: int) -> list[Any]:
    """`work` on each of them, so many at a time, results in their order."""
    if concurrency == 1:
        return [work(item) for item in given]
    with ThreadPoolExecutor(concurrency, thread_name_prefix="request") as pool:
        return list(pool.map(work, given))


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The documents of a stream of server-sent events, up to its end mark."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event


def _ids(choice: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[int, ...]:
    ids = choice.get("token_ids")
    if ids is None:
        spelled = [str(token).removeprefix("token_id:") for token in told.get("tokens") or ()]
        ids = [int(token) for token in spelled] if all(token.isdecimal() for token in spelled) else []
    return tuple(ids)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _told(reply: httpx.Response) -> str:
    text = reply.text[:2000]
    if NOT_A_NUMBER in text:
        return "NaN: the server was about to send a number that is none"
    try:
        given = reply.json()
        text = str(given.get("error", given).get("message") or given)
    except (ValueError, AttributeError):
        pass
    return f"HTTP {reply.status_code}: {' '.join(text.split())[:300]}"


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
