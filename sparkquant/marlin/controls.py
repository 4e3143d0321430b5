"""The runs of the gate: what each changes, and what was observed of it.

candidate    Marlin, CUDA graphs, atomic adds on: what is judged
repeat       the same again: how much two equal runs differ
atomic-off   VLLM_MARLIN_USE_ATOMIC_ADD=0
eager        no CUDA graphs, no compiler
backend      another kernel on the same weights
concurrent   eight requests at a time, all distinct
drafting     speculation with the checkpoint's own draft head
reference    the unquantized checkpoint, drafting too where it can
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from sparkquant.marlin.client import TIME_LIMIT, Client, at_once
from sparkquant.marlin.coherence import Finding, inspect
from sparkquant.marlin.dialect import Dialect, Settings
from sparkquant.marlin.metrics import CORRUPTED, PREEMPTED, Acceptance
from sparkquant.marlin.numbers import Position
from sparkquant.marlin.prompts import Prompts
from sparkquant.marlin.replies import Completion
from sparkquant.marlin.server import START_LIMIT
from sparkquant.marlin.server_log import ServerLog

CONCURRENCY = 8
TOP = 20
"""Log probabilities asked for at every position of a prompt."""
SERVED = "sparkquant"


class Role(StrEnum):
    """Names of runs, in the order in which they are worth having."""

    CANDIDATE = "candidate"
    REFERENCE = "reference"
    BACKEND = "backend"
    DRAFTING = "drafting"
    EAGER = "eager"
    CONCURRENT = "concurrent"
    ATOMIC_OFF = "atomic-off"
    REPEAT = "repeat"


QUICK = (Role.CANDIDATE, Role.REFERENCE, Role.BACKEND, Role.DRAFTING)
"""What `--quick` keeps; its candidate is asked eight at a time, too."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run to make: which checkpoint, with which settings, and how many requests at a time."""

    role: Role
    model: str
    settings: Settings
    concurrencies: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Observation:
    """What one run showed.

    failed     why there is nothing to see: the server did not start; "" otherwise
    answers    by concurrency, in the order of the asks; findings likewise
    scores     of the rows, [] for a row without
    scoring    the first error of scoring, "" without one
    acceptance of the drafts while the asks were answered, all and by kind of ask
    seconds    from the start of the process until it answered
    doubts     what is not known of the log of a server that somebody else started
    """

    role: Role
    settings: Settings
    log: ServerLog | None
    failed: str = ""
    version: str = ""
    answers: Mapping[int, Sequence[Completion]] = field(default_factory=dict)
    scores: Sequence[Sequence[Position]] = ()
    scoring: str = ""
    acceptance: Acceptance | None = None
    by_kind: Mapping[str, Acceptance] = field(default_factory=dict)
    cache: Mapping[str, str] = field(default_factory=dict)
    corrupted: float | None = None
    preempted: float | None = None
    seconds: float = 0.0
    died: str = ""
    doubts: Sequence[str] = ()

    def findings(self, concurrency: int) -> dict[int, tuple[Finding, ...]]:
        """What is wrong with the answers, by number of the ask; errors of requests are found apart."""
        found: dict[int, tuple[Finding, ...]] = {}
        for number, answer in enumerate(self.answers.get(concurrency, ())):
            if answer.error.startswith("NaN"):
                found[number] = (Finding(id="nan", what=answer.error),)
            elif not answer.error:
                wrong = inspect(
                    answer.text, answer.token_ids or None, answer.finish_reason or None, answer.logprobs or None
                )
                if wrong:
                    found[number] = wrong
        return found

    def errors(self) -> list[str]:
        """Requests that failed, each reason once."""
        every = [a.error for answers in self.answers.values() for a in answers if a.error]
        return list(dict.fromkeys(error for error in every if not error.startswith("NaN")))


def tasks_of(
    model: str,
    dialect: Dialect,
    schemes: frozenset[str],
    experts: frozenset[str],
    *,
    reference: str | None,
    drafts: int,
    reference_drafts: int,
    quick: bool,
) -> list[Task]:
    """The runs to make. drafts: tokens per step, 0 where a checkpoint has no draft head."""
    marlin = dialect.marlin(schemes, experts)
    on, off = dialect.atomic_add(True), dialect.atomic_add(False)
    other = dialect.other(schemes, experts)
    speculate = dialect.drafting(drafts) if drafts else None
    tasks = [Task(Role.CANDIDATE, model, marlin + on, (1, CONCURRENCY) if quick else (1,))]
    if reference is not None:
        draft = dialect.drafting(reference_drafts) if reference_drafts else Settings()
        tasks.append(Task(Role.REFERENCE, reference, draft))
    if other is not None:
        tasks.append(Task(Role.BACKEND, model, other + on))
    if speculate is not None:
        tasks.append(Task(Role.DRAFTING, model, marlin + on + speculate))
    tasks += [
        Task(Role.EAGER, model, marlin + on + dialect.eager()),
        Task(Role.CONCURRENT, model, marlin + on, (CONCURRENCY,)),
        Task(Role.ATOMIC_OFF, model, marlin + off),
        Task(Role.REPEAT, model, marlin + on),
    ]
    return [task for task in tasks if not quick or task.role in QUICK]


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs have in common. `base` comes first on the command line, `extra` (the user's) last."""

    command: tuple[str, ...]
    prompts: Prompts
    logs: Path
    base: tuple[str, ...]
    extra: tuple[str, ...] = ()
    max_tokens: int = 256
    start_limit: float = START_LIMIT
    answer_limit: float = TIME_LIMIT


def questions(client: Client, prompts: Prompts, concurrencies: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Everything that one server is asked, as fields of an observation."""
    begin = client.metrics()
    answers: dict[int, list[Completion]] = {}
    by_kind: dict[str, Acceptance] = {}
    for concurrency in concurrencies:
        found: dict[int, Completion] = {}
        for kind in dict.fromkeys(ask.kind for ask in prompts.asks):
            numbers = [number for number, ask in enumerate(prompts.asks) if ask.kind == kind]
            before = client.metrics()
            given = at_once(lambda n: client.complete(prompts.asks[n].ids, max_tokens), numbers, concurrency)
            accepted = client.metrics().acceptance(before)
            if accepted is not None and concurrency == concurrencies[0]:
                by_kind[kind] = accepted
            found |= dict(zip(numbers, given, strict=True))
        answers[concurrency] = [found[number] for number in range(len(prompts.asks))]
    end = client.metrics()
    scored = at_once(lambda row: client.score(row, TOP), prompts.rows, max(concurrencies))
    return {
        "version": client.version(), "answers": answers, "by_kind": by_kind, "acceptance": end.acceptance(begin),
        "scores": [positions for positions, _ in scored],
        "scoring": next((error for _, error in scored if error), ""),
        "cache": end.cache, "corrupted": end.since(begin, CORRUPTED), "preempted": end.since(begin, PREEMPTED),
    }  # fmt: skip
