"""Which answers of a run are broken, given how the reference answered the same prompts.

A broken kernel leaves structural marks. A small model that decodes greedily also runs into loops, with and without
quantization: where the reference loops anywhere, more loops than its own are needed to count.
"""

from __future__ import annotations

from sparkquant.marlin.coherence import Finding
from sparkquant.marlin.controls import Observation

LOOPING = frozenset({"repeated-token", "loop", "few-distinct"})
SHARE = 0.25
"""Of the answers: so many more than the reference's have to loop, and so many of a reference's may not be broken."""
FEWEST = 2


def broken_answers(run: Observation | None, concurrency: int, reference: Observation | None) -> dict[int, str]:
    """What is wrong, by number of the prompt (-1: the scored rows); {} where nothing is, or nothing was asked."""
    if run is None or run.failed:
        return {}
    found = run.findings(concurrency)
    known = {} if reference is None or reference.failed else reference.findings(1)
    hard = {number: _told(wrong, known.get(number, ()), loops=False) for number, wrong in found.items()}
    broken = {number: told for number, told in hard.items() if told}
    looping = {number: _told(wrong, (), loops=True) for number, wrong in found.items() if _loops(wrong)}
    usual = sum(map(_loops, known.values()))
    asked = len(run.answers.get(concurrency, ()))
    if reference is None or reference.failed:
        # Without a reference a run of one token is broken, a cycle may be the model's own.
        looping = {n: told for n, told in looping.items() if any(f.id == "repeated-token" for f in found[n])}
        broken |= looping
    elif usual == 0 or len(looping) >= usual + max(FEWEST, SHARE * asked):
        broken |= {number: told for number, told in looping.items() if number not in broken}
    if scored_nan(run) and not scored_nan(reference):
        broken[-1] = run.scoring
    return dict(sorted(broken.items()))


def sick(reference: Observation | None) -> bool:
    """A quarter of the reference's own answers are structurally broken: nothing can be held against it."""
    if reference is None or reference.failed:
        return False
    broken = [found for found in reference.findings(1).values() if _told(found, (), loops=False)]
    return len(broken) > SHARE * len(reference.answers.get(1, ())) or scored_nan(reference)


def scored_nan(run: Observation | None) -> bool:
    """The log probabilities of the rows were no numbers."""
    return run is not None and ("NaN" in run.scoring or "no numbers" in run.scoring)


def _loops(findings: tuple[Finding, ...]) -> bool:
    return any(finding.id in LOOPING for finding in findings)


def _told(findings: tuple[Finding, ...], known: tuple[Finding, ...], *, loops: bool) -> str:
    """The findings of one sort in words, without those that the reference shows at the same prompt."""
    usual = {finding.id for finding in known}
    if loops:
        return "; ".join(str(f) for f in findings if f.id in LOOPING)
    return "; ".join(str(f) for f in findings if f.broken and f.id not in LOOPING and f.id not in usual)
