"""What a completion server sends, as values: answers, streams, log probabilities, errors. Servers may send anything."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from sparkquant.marlin.noun import Noun
from sparkquant.marlin.numbers import CLAMPED, Position

MALFORMED = (
    httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError, ValueError, KeyError, IndexError, TypeError,
    AttributeError, RecursionError, OverflowError,
)  # fmt: skip
"""Everything that a server can do to who reads its answers."""

LARGEST = 1 << 28
"""Bytes of an answer; 20 log probabilities at each of 4,096 positions are about ten million."""
MOST_TOKENS = 1 << 20
"""Of one answer, whatever a server counts."""
NOT_A_NUMBER = "JSON compliant"
"""In the error of a server that was about to send NaN."""
NAN = "NaN"
"""How our own word for it begins."""
SURE = 1e-2
"""Logarithms of probabilities may exceed 0 by so much, by rounding."""
NO_NUMBERS = "are no numbers"


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


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
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


def completion(choice: Mapping[str, Any], seconds: float, prompted: int) -> Completion:
    """One answer that came whole."""
    logprobs = choice.get("logprobs") or {}
    return Completion(
        text=str(choice.get("text") or ""), token_ids=_ids(choice, logprobs),
        logprobs=tuple(_number(value) for value in logprobs.get("token_logprobs") or ()),
        finish_reason=str(choice.get("finish_reason") or ""), seconds=seconds, prompt_tokens=prompted,
    )  # fmt: skip


def positions(given: Sequence[Any], row: Sequence[int]) -> tuple[list[Position], str]:
    """Log probabilities by token, all of them numbers that one can compute with; or what is wrong with them."""
    found: list[Position] = []
    for number, entry in enumerate(given[1:], 1):
        values = {int(token): _number(value["logprob"]) for token, value in (entry or {}).items()}
        known = {token: max(value, CLAMPED) for token, value in values.items() if value is not None and value <= SURE}
        if not values or len(known) != len(values):
            return [], f"log probabilities at position {number} {NO_NUMBERS}"
        if row[number] not in known:
            return [], f"the log probability of the token at position {number} is not among those sent"
        found.append(known)
    return found, ""


def streamed(events: Iterator[Mapping[str, Any]], began: float, prompted: int) -> Completion:
    """The pieces of one answer, timed as they come."""
    first: float | None = None
    last = began
    ids: list[int] = []
    text: list[str] = []
    reason, count = "", 0
    for event in events:
        if "error" in event:
            return Completion(error=str(event["error"])[:300], seconds=time.monotonic() - began)
        count = int((event.get("usage") or {}).get("completion_tokens") or count)
        for choice in event.get("choices") or ():
            piece = choice.get("token_ids") or ()
            if piece or choice.get("text"):
                last = time.monotonic()
                first = first if first is not None else last
            ids += piece
            text.append(str(choice.get("text") or ""))
            reason = str(choice.get("finish_reason") or reason)
    if count and not ids:
        ids = [-1] * min(count, MOST_TOKENS)  # the server counts its tokens and does not name them
    return Completion(
        text="".join(text), token_ids=tuple(ids), finish_reason=reason, error="" if reason else "the stream broke off",
        first=None if first is None else first - began, seconds=last - began, prompt_tokens=prompted,
    )  # fmt: skip


def whole(reply: httpx.Response, until: float) -> httpx.Response:
    """All of an answer that ends by then."""
    content = b"".join(in_time(reply.iter_bytes(), until))
    plain = [(name, value) for name, value in reply.headers.items() if name != "content-encoding"]
    return httpx.Response(reply.status_code, headers=plain, content=content, request=reply.request)


def lines(parts: Iterator[bytes], until: float) -> Iterator[str]:
    """Lines of a stream that ends by then."""
    rest = b""
    for part in in_time(parts, until):
        *ended, rest = (rest + part).split(b"\n")
        yield from (line.decode("utf-8", errors="replace").rstrip("\r") for line in ended)
    yield rest.decode("utf-8", errors="replace")


def in_time(parts: Iterator[bytes], until: float) -> Iterator[bytes]:
    """What comes, unless it is endless: an answer that trickles in for ever is as good as none."""
    size = 0
    for part in parts:
        yield part
        size += len(part)
        if size > LARGEST:
            raise ValueError(f"an answer of more than {LARGEST:,} bytes")
        if time.monotonic() > until:
            raise httpx.ReadTimeout("the answer did not end in time")


def _ids(choice: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[int, ...]:
    ids = choice.get("token_ids")
    if ids is None:
        spelled = [str(token).removeprefix("token_id:") for token in told.get("tokens") or ()]
        ids = [int(token) for token in spelled] if all(token.isdecimal() for token in spelled) else []
    return tuple(ids)


def _number(value: Any) -> float | None:
    """None for what is no number: null, or a text where a number belongs, `"NaN"` too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if math.isnan(value) else float(value)


def told(reply: httpx.Response) -> str:
    """The error of a reply whose status is one."""
    text = reply.text[:2000]
    if NOT_A_NUMBER in text:
        return f"{NAN}: the server was about to send a number that is none"
    try:
        given = reply.json()
        text = str(given.get("error", given).get("message") or given)
    except MALFORMED:
        pass
    return f"HTTP {reply.status_code}: {' '.join(text.split())[:300]}"


def failure(error: Exception) -> str:
    """Why there is no reply."""
    return f"{type(error).__name__}: {error}"[:300]


def malformed(error: Exception) -> str:
    """Why a reply cannot be read."""
    return f"an answer of another form than vLLM's: {failure(error)}"[:300]


def refusal(error: Exception) -> str:
    """The same in one word."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    return type(error).__name__
