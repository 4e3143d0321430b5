"""Whether an answer is structurally broken: repeated tokens, `!!!!`, broken UTF-8, NaN. Not whether it is a good one.

    for finding in inspect(text, token_ids, finish_reason, logprobs):
        print(finding, finding.broken)

A broken kernel leaves these marks whatever the prompt and the sampling (field reports of 2026 on sm_12x). A small
model that decodes greedily may repeat itself too: where a reference answered the same prompt, compare the findings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from sparkquant.marlin.noun import Noun

LONGEST_RUN = 16
"""Times that one token may follow itself."""
LOOP_PERIOD, LOOP_TOKENS = 16, 64
"""A cycle of at most so many tokens is a loop when it fills this many at the end."""
FEWEST_DISTINCT, ENOUGH_TOKENS = 0.1, 32
"""Share of distinct tokens below which an answer of that length says nothing."""
CLAMPED = -9998.0
"""vLLM sends -9999 for minus infinity (`max(logprob, -9999.0)` in its completion endpoint)."""

STRUCTURAL = frozenset({"repeated-token", "exclamation-marks", "broken-utf8", "control-characters", "empty", "nan"})
"""Findings that no sound model of any size leaves; the others are a poor model's as well."""

_BANGS = re.compile(r"!{4,}|(?:! ){4,}")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_SAME_CHARACTER = re.compile(r"([^\s\w=*#~.+\-/\\|<>])\1{15,}|(\w)\2{31,}")


class Finding(Noun):
    """`id` is one of STRUCTURAL, `loop`, `few-distinct` or `no-eos`; `what` says it with numbers."""

    id: str
    what: str

    @property
    def broken(self) -> bool:
        """Structurally broken by itself, without a reference to compare with."""
        return self.id in STRUCTURAL

    def __str__(self) -> str:
        return self.what


def inspect(
    text: str,
    token_ids: Sequence[int] | None = None,
    finish_reason: str | None = None,
    logprobs: Sequence[float | None] | None = None,
) -> tuple[Finding, ...]:
    """Everything that is wrong with one answer.

    token_ids      ids of the answer, None where the server does not send them: characters are looked at instead
    finish_reason  `stop` or `length`; None: why it ended does not matter
    logprobs       of the chosen tokens; a missing one among them counts as NaN
    """
    found = [*_nan(logprobs), *_text(text, finish_reason), *_tokens(token_ids)]
    if not text.strip() and (finish_reason != "length" or not token_ids):
        found.append(Finding(id="empty", what="the answer is empty"))
    if finish_reason == "length" and not any(finding.broken for finding in found):
        found.append(Finding(id="no-eos", what="it did not end by itself"))
    return tuple(found)


def _nan(logprobs: Sequence[float | None] | None) -> Iterator[Finding]:
    wrong = [i for i, value in enumerate(logprobs or ()) if value is None or not CLAMPED < value < math.inf]
    if wrong:
        what = f"{len(wrong)} of {len(logprobs or ())} log probabilities are no number, the first at token {wrong[0]}"
        yield Finding(id="nan", what=what)


def _text(text: str, finish_reason: str | None) -> Iterator[Finding]:
    if match := _BANGS.search(text):
        yield Finding(id="exclamation-marks", what=f"{len(match[0])} exclamation marks at character {match.start()}")
    # A limit may cut the last character in its middle.
    whole = text.rstrip("�") if finish_reason != "stop" else text
    if "�" in whole:
        yield Finding(id="broken-utf8", what=f"{whole.count(chr(0xFFFD))} characters are broken UTF-8")
    if match := _CONTROL.search(text):
        yield Finding(id="control-characters", what=f"a control character {match[0]!r} at character {match.start()}")
    if match := _SAME_CHARACTER.search(text):
        yield Finding(
            id="repeated-token", what=f"{match[0][0]!r} {len(match[0])} times in a row at character {match.start()}"
        )


def _tokens(ids: Sequence[int] | None) -> Iterator[Finding]:
    if not ids:
        return
    run, start = _longest_run(ids)
    if run >= LONGEST_RUN:
        yield Finding(id="repeated-token", what=f"token {ids[start]} {run} times in a row at token {start}")
    elif period := _loop(ids):
        yield Finding(id="loop", what=f"the last {LOOP_TOKENS} tokens repeat a cycle of {period}")
    elif len(ids) >= ENOUGH_TOKENS and len(set(ids)) < FEWEST_DISTINCT * len(ids):
        yield Finding(id="few-distinct", what=f"{len(set(ids))} distinct tokens among {len(ids)}")


def _longest_run(ids: Sequence[int]) -> tuple[int, int]:
    """(length, where it begins) of the longest run of one token."""
    best, start, at = 1, 0, 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or ids[index] != ids[at]:
            if index - at > best:
                best, start = index - at, at
            at = index
    return best, start


def _loop(ids: Sequence[int]) -> int:
    """The shortest period of the tail, 0 when it has none."""
    tail = ids[-LOOP_TOKENS:]
    if len(tail) < LOOP_TOKENS:
        return 0
    return next((p for p in range(1, LOOP_PERIOD + 1) if tail[p:] == tail[: len(tail) - p]), 0)
