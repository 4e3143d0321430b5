"""`Symptom`: whether a server's answers are structurally broken, and under which condition."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from sparkquant.marlin.asking import TIME_LIMIT, Answer, ask
from sparkquant.marlin.coherence import Finding, inspect
from sparkquant.marlin.noun import Noun

CONCURRENCY = 8
"""The documented Marlin corruption on 12.x shows among concurrent requests alone."""


class Kind(StrEnum):
    """BROKEN     repeated tokens, `!!!!`, broken UTF-8, NaN: no prompt and no sampling setting helps
    CONCURRENT the same prompts are right alone and broken among others
    UNSTABLE   not broken, but a greedy prompt gives another text when it is asked again alone
    COHERENT   nothing is structurally broken; the answers may still be poor
    SILENT     the server answers with errors
    """

    BROKEN = "broken"
    CONCURRENT = "broken-when-concurrent"
    UNSTABLE = "unstable"
    COHERENT = "coherent"
    SILENT = "errors"


class Symptom(Noun):
    """`seen` are sentences with their condition; `alone` and `together` count the broken of `asked` prompts each."""

    kind: Kind
    asked: int
    alone: int
    together: int
    differing: int
    seen: tuple[str, ...]


def classify(text: str) -> Symptom:
    """One text that a server printed."""
    answer = Answer(prompt=0, text=text, token_ids=(), logprobs=(), finish_reason="", error="")
    found = broken(answer)
    return Symptom(
        kind=Kind.BROKEN if found else Kind.COHERENT, asked=1, alone=int(bool(found)), together=0, differing=0,
        seen=(*found, *_weak(answer)),
    )  # fmt: skip


def examine_server(url: str, *, limit: float = TIME_LIMIT) -> Symptom:
    """The same greedy prompts alone, alone again, and eight at once. Raises EnvironmentMissing when nobody answers."""
    first = ask(url, concurrency=1, limit=limit)
    if all(answer.error for answer in first):
        return judge(first, first, first)
    again, together = (ask(url, concurrency=number, limit=limit) for number in (1, CONCURRENCY))
    return judge(first, again, together)


def judge(first: Sequence[Answer], again: Sequence[Answer], together: Sequence[Answer]) -> Symptom:
    """What three rounds of answers to the same prompts show."""
    errors = [answer for answer in (*first, *again, *together) if answer.error]
    alone = {a.prompt: found for a in (*first, *again) if (found := broken(a))}
    crowd = {a.prompt: found for a in together if (found := broken(a))}
    differing = sum(a.text != b.text for a, b in zip(first, again, strict=True) if not (a.error or b.error))
    seen = [f"prompt {prompt + 1}, alone: {'; '.join(found)}" for prompt, found in sorted(alone.items())]
    seen += [
        f"prompt {prompt + 1}, one of {CONCURRENCY}: {'; '.join(found)}" for prompt, found in sorted(crowd.items())
    ]
    weak = {a.prompt: found for a in (*first, *together) if not broken(a) and (found := _weak(a))}
    seen += [f"prompt {prompt + 1}: {'; '.join(found)}" for prompt, found in sorted(weak.items())]
    seen += list(dict.fromkeys(f"an error: {answer.error}" for answer in errors))
    kind = (
        Kind.SILENT if len(errors) > len(first) else Kind.BROKEN if alone else Kind.CONCURRENT if crowd
        else Kind.SILENT if errors else Kind.UNSTABLE if differing else Kind.COHERENT
    )  # fmt: skip
    return Symptom(
        kind=kind, asked=len(first), alone=len(alone), together=len(crowd), differing=differing, seen=tuple(seen)
    )


def broken(answer: Answer) -> list[str]:
    """What is structurally wrong with one answer; an error of the request is not the model's."""
    return [str(finding) for finding in _findings(answer) if finding.broken]


def _weak(answer: Answer) -> list[str]:
    """What a kernel may have done, and a small model does by itself."""
    return [f"{finding} (a small model does that too)" for finding in _findings(answer) if not finding.broken]


def _findings(answer: Answer) -> tuple[Finding, ...]:
    # A short answer may end at the limit: why it ended is not asked for here.
    return () if answer.error else inspect(answer.text, answer.token_ids or None, None, answer.logprobs or None)
