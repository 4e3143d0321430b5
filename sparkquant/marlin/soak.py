"""Keep a server under varied load for a while and look again: the known faults take minutes to hours to show."""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkquant.events import Listener, Said
from sparkquant.marlin.client import Client, at_once
from sparkquant.marlin.coherence import inspect
from sparkquant.marlin.controls import TOP
from sparkquant.marlin.keeper import descendants
from sparkquant.marlin.log import read_log_file
from sparkquant.marlin.metrics import CORRUPTED
from sparkquant.marlin.numbers import Position, divergence
from sparkquant.marlin.prompts import Prompts
from sparkquant.marlin.replies import Completion
from sparkquant.marlin.server import Server
from sparkquant.marlin.verdict import Evidence, Outcome, Verdict

WIDTHS = (1, 2, 4, 8)
LENGTHS = (32, 128, 256)
LAST_GROWTH = 1.2
"""Memory at the end over memory after the warm-up; more is a leak."""
WARM_UP = 0.25
"""Part of the time in which memory may grow: caches fill, kernels are compiled for lengths not seen before."""
SAMPLES = 9
"""Of memory, whose median counts."""
SHOWN = 8
SAID_SECONDS = 60.0


@dataclass(frozen=True)
class Load:
    """What is asked, what the server answered before, and the longest answer that was asked for then."""

    prompts: Prompts
    answers: Sequence[Completion]
    scores: Sequence[Sequence[Position]]
    max_tokens: int

    def usual(self, number: int) -> set[str]:
        """What was found in an answer when the server was fresh: a small model may repeat itself."""
        answer = self.answers[number]
        return {finding.id for finding in inspect(answer.text, answer.token_ids or None, None, answer.logprobs or None)}


@dataclass
class _Seen:
    """Counts and the first faults; nothing in it grows with time."""

    rounds: int = 0
    requests: int = 0
    tokens: int = 0
    broken: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    early: deque[int] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    late: deque[int] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    @property
    def enough(self) -> bool:
        """There is nothing more to learn."""
        return len(self.broken) >= SHOWN or len(self.errors) >= SHOWN

    @property
    def host_bytes(self) -> list[int]:
        """Memory after the warm-up, and at the end."""
        return [int(statistics.median(samples)) if samples else 0 for samples in (self.early, self.late)]


def soak(client: Client, server: Server, load: Load, seconds: float, listener: Listener) -> dict[str, Any]:
    """Serve for so many seconds; what was seen, as plain JSON. The load is the same in every run (seeded)."""
    choice, seen = random.Random(0), _Seen()
    usual = [load.usual(number) for number in range(len(load.prompts.asks))]
    began = said = time.monotonic()
    before = client.metrics()
    while time.monotonic() < began + seconds and server.alive and not seen.enough:
        _round(client, load, usual, choice, seen, began)
        memory = resident_bytes(server)
        (seen.early if time.monotonic() < began + WARM_UP * seconds or not seen.early else seen.late).append(memory)
        if time.monotonic() > said + SAID_SECONDS:
            said = time.monotonic()
            wrong = len(seen.broken) + len(seen.errors)
            listener(Said(f"soak: {said - began:.0f} of {seconds:.0f} s, {seen.requests} requests, {wrong} wrong"))
    alive = server.survives() if seen.errors else server.alive
    again, scoring = _again(client, load) if alive else (None, "the server ended")
    log = read_log_file(server.launch.log)
    early, late = seen.host_bytes
    return {
        "seconds": round(time.monotonic() - began, 1), "asked_seconds": seconds, "rounds": seen.rounds,
        "requests": seen.requests, "tokens": seen.tokens, "broken": seen.broken[:SHOWN],
        "errors": list(dict.fromkeys(seen.errors))[:SHOWN],
        "corrupted_requests": client.metrics().since(before, CORRUPTED), "alive": alive,
        "host_bytes": [early, late], "grown": bool(early and late > LAST_GROWTH * early),
        "kl_to_before": again, "scoring": scoring,
        "notices": [notice.text for notice in log.notices if notice.fails],
        "faults": [fault.text for fault in log.faults],
    }  # fmt: skip


def _round(
    client: Client, load: Load, usual: Sequence[set[str]], choice: random.Random, seen: _Seen, began: float
) -> None:
    """A few requests at once; an answer that breaks counts where the same prompt did not break before."""
    width, length = choice.choice(WIDTHS), min(choice.choice(LENGTHS), load.max_tokens)
    asks = load.prompts.asks
    numbers = choice.sample(range(len(asks)), min(2 * width, len(asks)))
    answers = at_once(lambda number: client.complete(asks[number].ids, length), numbers, width)
    seen.rounds, seen.requests = seen.rounds + 1, seen.requests + len(answers)
    for number, answer in zip(numbers, answers, strict=True):
        seen.tokens += answer.tokens
        if answer.error:
            seen.errors.append(answer.error)
            continue
        found = inspect(answer.text, answer.token_ids or None, None, answer.logprobs or None)
        told = "; ".join(str(finding) for finding in found if finding.broken and finding.id not in usual[number])
        if told:
            seen.broken.append(f"after {time.monotonic() - began:.0f} s, {width} at once: {told}")


def _again(client: Client, load: Load) -> tuple[float | None, str]:
    """(KL of the scored rows now to the same rows when the server was fresh, why there is none)"""
    scored = at_once(lambda row: client.score(row, TOP), load.prompts.rows, 1)
    wrong = next((error for _, error in scored if error), "")
    found = None if wrong else divergence(load.scores, [positions for positions, _ in scored], load.prompts.rows)
    return None if found is None else found.kl, wrong


def after_soak(verdict: Verdict, found: Mapping[str, Any], limit: float, next: str) -> Verdict:
    """The verdict on everything before, unless the soak says worse: then with another `next` command.

    limit  nats that two equal runs may differ
    """
    complaints = list(_complaints(found, limit))
    evidence = (
        *verdict.evidence,
        *(Evidence(what=what, source="coherence", where="soak", points=o) for what, o in complaints),
    )
    if verdict.outcome is not Outcome.PASS or not complaints:
        return verdict.model_copy(update={"evidence": evidence})
    what, outcome = complaints[0]
    missing = (f"a soak without this: {what}",) if outcome is Outcome.INCONCLUSIVE else ()
    return verdict.model_copy(
        update={"outcome": outcome, "summary": what, "missing": missing, "evidence": evidence, "next": next}
    )


def _complaints(found: Mapping[str, Any], limit: float) -> Iterator[tuple[str, Outcome]]:
    """Everything that speaks against it, the worst first. What was right when the server was fresh is no checkpoint's
    fault: answers that break and numbers that drift are the kernels'."""
    for text in found["broken"]:
        yield f"an answer broke under load: {text}", Outcome.KERNEL_FAULT
    if found["corrupted_requests"]:
        yield (
            f"the server counts {found['corrupted_requests']:.0f} corrupted requests (NaN in logits)",
            Outcome.KERNEL_FAULT,
        )
    if found["kl_to_before"] is not None and found["kl_to_before"] > limit:
        what = f"the same rows are {found['kl_to_before']:.4f} nats from what they were before (limit {limit:.4f})"
        yield what, Outcome.KERNEL_FAULT
    for text in found["faults"]:
        yield f"a fault in the log under load: {text}", Outcome.INCONCLUSIVE
    for text in found["notices"]:
        yield f"a warning in the log under load: {text}", Outcome.INCONCLUSIVE
    if not found["alive"]:
        yield f"the server ended after {found['seconds']:.0f} s under load", Outcome.INCONCLUSIVE
    for text in found["errors"]:
        yield f"a request failed under load: {text}", Outcome.INCONCLUSIVE
    if found["scoring"] and found["alive"]:
        yield f"no log probabilities after the load: {found['scoring']}", Outcome.INCONCLUSIVE
    if found["grown"]:
        early, late = found["host_bytes"]
        yield f"host memory grew from {early:,} to {late:,} bytes", Outcome.INCONCLUSIVE


def resident_bytes(server: Server) -> int:
    """Host memory of the server and all of its descendants; on unified memory that is the GPU's as well."""
    process = server.process
    if process is None:
        return 0
    total = 0
    for pid in descendants(process.pid):
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        except (OSError, IndexError, ValueError):
            continue
    return total
