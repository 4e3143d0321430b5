"""From what the runs showed to one verdict.

In this order: the environment; the identity of the kernels; coherence, alone and among other requests; the controls
against each other; the reference; the draft head; what is missing. A run that proves nothing never passes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sparkquant.marlin.answers import broken_answers, sick
from sparkquant.marlin.comparing import Comparisons, Lengths, lengths
from sparkquant.marlin.controls import CONCURRENCY, Observation, Role
from sparkquant.marlin.drafts import complaint
from sparkquant.marlin.log_verdict import judge_log
from sparkquant.marlin.metrics import Acceptance
from sparkquant.marlin.thresholds import Thresholds
from sparkquant.marlin.verdict import Evidence, Outcome, Verdict

SHOWN = 4
CONTROLS = (Role.EAGER, Role.BACKEND, Role.ATOMIC_OFF)


@dataclass(frozen=True)
class Case:
    """Everything that is decided from.

    wanted       scheme -> kernel family that must have run in the candidate
    expected     runs that were to be made; one that is not among `seen` is missing
    drafts       the checkpoint has a draft head that the engine can use
    capability   "" where nobody knows it
    log          the file that the candidate's log went to; OUT.validate/candidate.log where nobody says
    """

    out: str
    seen: Mapping[Role, Observation]
    compared: Comparisons
    thresholds: Thresholds
    wanted: Mapping[str, str]
    expected: tuple[Role, ...]
    drafts: bool
    capability: str
    reference_acceptance: Acceptance | None
    log: str = ""
    tp: int = 1
    evidence: list[Evidence] = field(default_factory=list)

    def note(self, what: str, where: str, points: Outcome | None = None, source: str = "control") -> None:
        """Keep an observation."""
        self.evidence.append(Evidence(what=what, source=source, where=where, points=points))

    @property
    def candidate(self) -> Observation:
        """What is judged."""
        return self.seen[Role.CANDIDATE]

    @cached_property
    def lengths(self) -> Lengths:
        """Of the answers."""
        return lengths(self.seen, self.compared.reference_lengths)

    def verdict(self, outcome: Outcome, summary: str, next: str, missing: tuple[str, ...] = ()) -> Verdict:
        """With everything that was noted so far."""
        return Verdict(
            outcome=outcome, summary=summary, evidence=tuple(self.evidence), next=next, missing=tuple(missing)
        )

    @property
    def verify(self) -> str:
        """The static gate, all values."""
        return f"sparkquant verify {shlex.quote(self.out)} --deep --source SRC"


def decide(case: Case) -> Verdict:
    """The verdict."""
    _note_numbers(case)
    return (
        _environment(case)
        or _identity(case)
        or _coherence(case)
        or _crowd(case)
        or _controls(case)
        or _reference(case)
        or _drafting(case)
        or _missing(case)
        or _passed(case)
    )


def _environment(case: Case) -> Verdict | None:
    """The candidate did not start, or not to its end: the log says whose fault it is."""
    run = case.candidate
    if not (run.failed or run.died):
        return None
    case.note(run.failed or run.died, run.role, source="log")
    if run.log is None:
        return case.verdict(Outcome.INCONCLUSIVE, run.failed, "sparkquant doctor", ("the server's log",))
    logged = judge_log(run.log, wanted=dict(case.wanted))
    case.evidence.extend(logged.evidence)
    if logged.outcome in (Outcome.PASS, Outcome.INCONCLUSIVE):
        if run.died and (eager := case.seen.get(Role.EAGER)) and not (eager.failed or eager.died):
            what = "the server ended while it answered, without a reason in its log; eager answered everything"
            return case.verdict(Outcome.EXECUTION_FAULT, what, logged.next)
        missing = logged.missing or ("why the server ended",)
        return case.verdict(Outcome.INCONCLUSIVE, run.failed or run.died, logged.next, missing)
    return case.verdict(logged.outcome, logged.summary, logged.next)


def _identity(case: Case) -> Verdict | None:
    """Which kernels ran, by the log of every run that was to use them."""
    for role in (Role.CANDIDATE, Role.REPEAT, Role.ATOMIC_OFF, Role.EAGER, Role.CONCURRENT, Role.DRAFTING):
        run = case.seen.get(role)
        if run is None or run.log is None or run.failed:
            continue
        logged = judge_log(run.log, wanted=dict(case.wanted), alive=True)
        if role is Role.CANDIDATE:
            case.evidence.extend(logged.evidence)
        if logged.outcome not in (Outcome.PASS, Outcome.INCONCLUSIVE):
            case.note(logged.summary, role, logged.outcome, source="log")
            return case.verdict(logged.outcome, f"{role}: {logged.summary}", logged.next)
    return None


def _broken(case: Case, role: Role, concurrency: int) -> dict[int, str]:
    return broken_answers(case.seen.get(role), concurrency, case.seen.get(Role.REFERENCE))


def _coherence(case: Case) -> Verdict | None:
    """Answers of the candidate when asked one by one."""
    if sick(case.seen.get(Role.REFERENCE)):
        what = "the reference's own answers are structurally broken: the engine, or the reference, is at fault"
        case.note(what, Role.REFERENCE, source="coherence")
        missing = ("a reference whose answers are sound",)
        return case.verdict(Outcome.INCONCLUSIVE, what, look_closer(case), missing)
    found = _broken(case, Role.CANDIDATE, 1)
    for number, what in list(found.items())[:SHOWN]:
        case.note(f"{_prompt(number)}: {what}", Role.CANDIDATE, source="coherence")
    if not found:
        if errors := case.candidate.errors():
            case.note(errors[0], Role.CANDIDATE, source="coherence")
            return _unanswered(case, errors[0])
        return None
    broken = len([number for number in found if number >= 0])
    what = f"{broken} answers of {len(case.candidate.answers.get(1, ()))} are structurally broken"
    return _who(case, what)


def _unanswered(case: Case, error: str) -> Verdict:
    """Requests that fail: a control on the same weights that answers all of them says whose fault it is."""
    what = f"requests fail: {error}"
    for role in CONTROLS:
        run = case.seen.get(role)
        if run is None or run.failed or run.died or run.errors():
            continue
        outcome = Outcome.EXECUTION_FAULT if role is Role.EAGER else Outcome.KERNEL_FAULT
        case.note(f"{role}: answers every prompt", role, outcome, source="coherence")
        return case.verdict(outcome, f"{what}; {role} answers everything on the same weights", look_closer(case))
    return case.verdict(Outcome.INCONCLUSIVE, what, look_closer(case), ("answers to every prompt",))


def _prompt(number: int) -> str:
    return "the scored rows" if number < 0 else f"prompt {number + 1}"


def _who(case: Case, what: str) -> Verdict:
    """Whose fault broken answers are, by the controls that are sound."""
    runs = {role: not _broken(case, role, 1) for role in CONTROLS if _answered(case, role)}
    if _answered(case, Role.REFERENCE):
        runs[Role.REFERENCE] = True  # a broken one was turned away before
    for role, is_sound in runs.items():
        case.note(f"{role}: {'sound' if is_sound else 'broken too'}", role, source="coherence")
    if runs.get(Role.EAGER):
        return case.verdict(Outcome.EXECUTION_FAULT, f"{what}; eager is right on the same weights", look_closer(case))
    if runs.get(Role.BACKEND) or runs.get(Role.ATOMIC_OFF):
        right = "another kernel" if runs.get(Role.BACKEND) else "Marlin without atomic adds"
        return case.verdict(Outcome.KERNEL_FAULT, f"{what}; {right} is right on the same weights", look_closer(case))
    if not any(role in runs for role in CONTROLS):
        missing = ("a control on the same weights: eager, or another kernel",)
        return case.verdict(Outcome.INCONCLUSIVE, what, _again(case), missing)
    if runs.get(Role.REFERENCE):
        return case.verdict(
            Outcome.CHECKPOINT_FAULT, f"{what}, in every control too; the reference answers well", case.verify
        )
    return case.verdict(
        Outcome.INCONCLUSIVE, f"{what}, in every control too", f"{_again(case)} --reference SRC", ("a reference",)
    )


def _answered(case: Case, role: Role) -> bool:
    run = case.seen.get(role)
    return (
        run is not None
        and not run.failed
        and any(not a.error or a.error.startswith("NaN") for a in run.answers.get(1, ()))
    )


def _crowd(case: Case) -> Verdict | None:
    """The same prompts among each other: the documented Marlin fault of sm_12x shows there alone."""
    for role in (Role.CONCURRENT, Role.CANDIDATE):
        run = case.seen.get(role)
        if run is None or run.failed or CONCURRENCY not in run.answers:
            continue
        found = _broken(case, role, CONCURRENCY)
        for number, what in list(found.items())[:SHOWN]:
            case.note(f"{_prompt(number)}, one of {CONCURRENCY}: {what}", role, Outcome.KERNEL_FAULT, "coherence")
        if run.died:
            case.note(run.died, role, Outcome.KERNEL_FAULT, "log")
        if found or run.died:
            what = f"the same prompts are right alone and broken among {CONCURRENCY}" if found else run.died
            return case.verdict(Outcome.KERNEL_FAULT, what, look_closer(case))
    return None


def _controls(case: Case) -> Verdict | None:
    """Runs on the same weights that differ by more than two equal runs do."""
    limit = case.thresholds.between_controls(case.compared.floor)
    apart = {}
    for role in CONTROLS:
        found = case.compared.controls.get(role)
        if found is not None and found.kl > limit:
            apart[role] = found.kl
            case.note(f"KL to {role} {found.kl:.4f}, limit {limit:.4f}", role, Outcome.KERNEL_FAULT)
    crowd = case.compared.controls.get(Role.CONCURRENT)
    if not apart and crowd is not None and crowd.kl > limit:
        case.note(f"KL to concurrent {crowd.kl:.4f}, limit {limit:.4f}", Role.CONCURRENT, Outcome.KERNEL_FAULT)
        what = f"the same rows differ by {crowd.kl:.3f} nats when they are computed among {CONCURRENCY}"
        return case.verdict(Outcome.KERNEL_FAULT, what, look_closer(case))
    if not apart:
        return None
    told = ", ".join(f"{role} by {kl:.3f} nats" for role, kl in apart.items())
    what = f"runs on the same weights disagree: {told} (limit {limit:.3f})"
    near = {role: case.compared.to_reference.get(role) for role in (Role.CANDIDATE, *apart)}
    mine = near[Role.CANDIDATE]
    if mine is None:
        if Role.BACKEND in apart and Role.EAGER in apart:
            return case.verdict(Outcome.KERNEL_FAULT, what, look_closer(case))
        if Role.EAGER in apart and Role.BACKEND in case.compared.controls:
            missing = ("a reference: who of them is right",)
            return case.verdict(Outcome.INCONCLUSIVE, what, f"{_again(case)} --reference SRC", missing)
        if Role.EAGER in apart:
            return case.verdict(Outcome.EXECUTION_FAULT, what, look_closer(case))
        return case.verdict(Outcome.KERNEL_FAULT, what, look_closer(case))
    eager = near.get(Role.EAGER)
    if eager is not None and eager.kl < mine.kl:
        return case.verdict(Outcome.EXECUTION_FAULT, f"{what}; eager is nearer to the reference", look_closer(case))
    better = [role for role, found in near.items() if role not in (Role.CANDIDATE,) and found and found.kl < mine.kl]
    if better:
        return case.verdict(Outcome.KERNEL_FAULT, f"{what}; {better[0]} is nearer to the reference", look_closer(case))
    if mine.kl > case.thresholds.reference_kl:
        return case.verdict(Outcome.KERNEL_FAULT, f"{what}; none is near the reference", look_closer(case))
    # The candidate is the nearest one and within its limit: the control is at fault, not what is judged.
    case.note(f"{what}; the candidate is the nearest to the reference: the control is at fault", Role.CANDIDATE)
    return None


def _reference(case: Case) -> Verdict | None:
    """Controls agree; how far is the result from what it was made from?"""
    found = case.compared.to_reference.get(Role.CANDIDATE)
    if found is None:
        return None
    limit = case.thresholds.reference_kl
    if found.kl > limit:
        case.note(f"KL to the reference {found.kl:.4f}, limit {limit:g}", Role.REFERENCE, Outcome.CHECKPOINT_FAULT)
        controls = [role for role in CONTROLS if role in case.compared.controls]
        agreed = f"{' and '.join(controls)} agree with it" if controls else "no control speaks against the kernel"
        what = f"the result is {found.kl:.3f} nats from the reference (limit {limit:g}); {agreed}"
        if not controls:
            missing = ("a control on the same weights",)
            return case.verdict(Outcome.INCONCLUSIVE, what, _again(case), missing)
        return case.verdict(Outcome.CHECKPOINT_FAULT, what, case.verify)
    stops = case.lengths
    if stops.reference_stops and stops.stops < case.thresholds.stops_share * stops.reference_stops:
        what = f"{stops.stops} answers end by themselves, {stops.reference_stops} of the reference do"
        case.note(what, Role.CANDIDATE, Outcome.CHECKPOINT_FAULT, "coherence")
        return case.verdict(Outcome.CHECKPOINT_FAULT, what, case.verify)
    return None


def _drafting(case: Case) -> Verdict | None:
    """Acceptance at the first position, against the reference's."""
    run = case.seen.get(Role.DRAFTING)
    if not case.drafts or run is None:
        return None
    if run.failed or run.died:
        logged = judge_log(run.log) if run.log is not None else None
        fault = logged is not None and logged.outcome is not Outcome.PASS
        outcome = logged.outcome if logged is not None and fault else Outcome.INCONCLUSIVE
        what = f"with drafts: {logged.summary if logged is not None and fault else run.failed or run.died}"
        case.note(what, Role.DRAFTING, outcome, "log")
        return case.verdict(
            outcome,
            what,
            logged.next if logged is not None else look_closer(case),
            ("drafts",) if outcome is Outcome.INCONCLUSIVE else (),
        )
    what = complaint(run.acceptance, case.reference_acceptance, case.thresholds)
    if not what:
        return None
    case.note(what, Role.DRAFTING, Outcome.CHECKPOINT_FAULT, "metrics")
    return case.verdict(Outcome.CHECKPOINT_FAULT, f"the draft head: {what}", case.verify)


def _missing(case: Case) -> Verdict | None:
    """What was not seen. Another kernel may be missing where the reference says that the answers are right."""
    found = list(_absent(case))
    if not found:
        return None
    what = "not everything was seen: " + "; ".join(found)
    reference = "" if any(role is Role.REFERENCE for role in case.seen) else " --reference SRC"
    return case.verdict(Outcome.INCONCLUSIVE, what, f"{_again(case)}{reference}", tuple(found))


def _absent(case: Case) -> Iterator[str]:
    run = case.candidate
    if run.log is not None:
        yield from judge_log(run.log, wanted=dict(case.wanted), alive=True).missing
    else:
        yield "the server's log: which kernels ran"
    yield from run.doubts
    if run.scoring:
        yield f"log probabilities of the candidate: {run.scoring}"
    if run.log is not None and run.log.tensor_parallel not in (None, case.tp):
        yield f"a server with {case.tp} ranks: the log tells of {run.log.tensor_parallel}"
    if not case.capability:
        yield "the compute capability (--capability)"
    if Role.CANDIDATE not in case.compared.to_reference:
        yield "a reference to compare with"
    elif case.compared.to_reference[Role.CANDIDATE] is None:
        yield "log probabilities of the reference"
    for role in case.expected:
        seen = case.seen.get(role)
        if seen is None:
            yield f"the run {role}"
        elif seen.failed or seen.died:
            if role is not Role.BACKEND:
                yield f"the run {role}: {seen.failed or seen.died}"
            else:
                case.note(f"another kernel did not start: {seen.failed}", role)
        elif seen.scoring and role is not Role.CANDIDATE:
            yield f"log probabilities of {role}: {seen.scoring}"
        elif seen.errors() and role is not Role.CANDIDATE:
            yield f"answers of {role}: {seen.errors()[0]}"
    drafted = case.seen.get(Role.DRAFTING)
    if case.drafts and drafted is not None and not drafted.failed:
        fewest = case.thresholds.fewest_drafts
        if drafted.acceptance is None:
            yield "the counters of drafts"
        elif drafted.acceptance.drafts < fewest:
            yield f"{fewest} drafts: {drafted.acceptance.drafts} say nothing"
        elif case.reference_acceptance is None:
            yield "the acceptance of the reference's drafts"


def _passed(case: Case) -> Verdict:
    to_reference = case.compared.to_reference[Role.CANDIDATE]
    assert to_reference is not None
    ran = ", ".join(f"{family} for {scheme}" for scheme, family in case.wanted.items()) or "no weight-only scheme"
    runs = len([run for run in case.seen.values() if not run.failed])
    what = (
        f"{ran}; coherent alone and among {CONCURRENCY}; KL to the reference {to_reference.kl:.4f}, {runs} runs agree"
    )
    return case.verdict(Outcome.PASS, what, f"sparkquant bench {shlex.quote(case.out)}")


def _note_numbers(case: Case) -> None:
    """What was measured, whatever comes of it."""
    if case.compared.floor is not None:
        case.note(f"two equal runs differ by {case.compared.floor:.5f} nats", Role.REPEAT)
    for role, found in case.compared.controls.items():
        if role is not Role.REPEAT and found is not None:
            case.note(f"KL {found.kl:.5f} (up to {found.kl_high:.5f}) to {role}", role)
    mine = case.compared.to_reference.get(Role.CANDIDATE)
    if mine is not None:
        error = "" if mine.kl_se is None else f" ± {mine.kl_se:.5f}"
        case.note(
            f"KL {mine.kl:.5f}{error} (up to {mine.kl_high:.5f}) to the reference, NLL {mine.nll[0]:.4f} there and"
            f" {mine.nll[1]:.4f} here", Role.REFERENCE,
        )  # fmt: skip
    told = case.lengths
    if told.reference and told.mean > (1 + case.thresholds.length_growth) * told.reference:
        case.note(f"answers of {told.mean:.0f} tokens, the reference's have {told.reference:.0f}", Role.CANDIDATE)


def look_closer(case: Case) -> str:
    """What looks closer at the candidate."""
    log = case.log or f"{case.out.rstrip('/')}.validate/candidate.log"
    return f"sparkquant diagnose {shlex.quote(case.out)} --server-log {shlex.quote(log)}"


def _again(case: Case) -> str:
    return f"sparkquant validate {shlex.quote(case.out)}"
