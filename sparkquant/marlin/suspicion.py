"""`conclude`: from what a log, the static gate and the answers say, to one suspect and one next command.

In this order: what the log proves; a red static gate; answers that break among others alone; answers that break always.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from sparkquant.marlin import next_step
from sparkquant.marlin.known_bad import KnownBad
from sparkquant.marlin.predicted import differences
from sparkquant.marlin.server_log import ServerLog
from sparkquant.marlin.symptom import CONCURRENCY, Kind, Symptom
from sparkquant.marlin.verdict import Evidence, Outcome, Verdict
from sparkquant.report import Report

SHOWN = 8
"""Failed checks and broken answers that are cited."""


class Suspect(StrEnum):
    """What to look at first; `quality` is a sound model that answers poorly, `none` where nothing points anywhere."""

    KERNEL = "kernel"
    EXECUTION = "execution"
    CHECKPOINT = "checkpoint"
    ENVIRONMENT = "environment"
    QUALITY = "quality"
    NONE = "none"


SUSPECTS = {
    Outcome.KERNEL_FAULT: Suspect.KERNEL,
    Outcome.EXECUTION_FAULT: Suspect.EXECUTION,
    Outcome.CHECKPOINT_FAULT: Suspect.CHECKPOINT,
    Outcome.ENVIRONMENT_FAULT: Suspect.ENVIRONMENT,
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is known. `model` is the folder that was verified, "" where none was passed."""

    model: str
    log: ServerLog | None
    logged: Verdict | None
    report: Report | None
    symptom: Symptom | None
    known: tuple[KnownBad, ...]


def conclude(case: Case) -> tuple[Suspect, Verdict]:
    """The suspect and the verdict."""
    evidence = (*(case.logged.evidence if case.logged else ()), *_evidence(case))
    suspect, verdict = _log(case) or _static(case) or _symptom(case) or _sound(case)
    return suspect, verdict.model_copy(update={"evidence": evidence})


def _evidence(case: Case) -> Iterator[Evidence]:
    if case.report is not None:
        for check in case.report.failed[:SHOWN]:
            yield Evidence(what=check.message, source="static", where=check.id, points=Outcome.CHECKPOINT_FAULT)
        if case.report.ok:
            passed = sum(check.status == "pass" for check in case.report.checks)
            yield Evidence(what=f"{passed} static checks pass, none fails", source="static", where="verify")
        if case.log is not None:
            for difference in differences(case.report, case.log):
                yield Evidence(what=difference, source="static", where="rules.kernel")
    if case.symptom is not None:
        yield from _answers(case.symptom)
    for row in case.known:
        yield Evidence(what=f"{row.what} ({row.status}; {row.source})", source="table", where=row.id)


def _answers(symptom: Symptom) -> Iterator[Evidence]:
    if symptom.asked > 1:
        counts = f"broken alone {symptom.alone}, one of {CONCURRENCY} {symptom.together}, of {symptom.asked} prompts"
        changed = f"; {symptom.differing} changed when asked again" if symptom.differing else ""
        yield Evidence(what=counts + changed, source="coherence", where="answers")
    for seen in symptom.seen[:SHOWN]:
        yield Evidence(what=seen, source="coherence", where="answers")
    if not symptom.seen:
        yield Evidence(what="no answer is structurally broken", source="coherence", where="answers")


def _verdict(outcome: Outcome, summary: str, next: str, missing: tuple[str, ...] = ()) -> Verdict:
    return Verdict(outcome=outcome, summary=summary, evidence=(), next=next, missing=missing)


def _log(case: Case) -> tuple[Suspect, Verdict] | None:
    """What the log proves stands."""
    if case.logged is None or case.logged.outcome not in SUSPECTS:
        return None
    return SUSPECTS[case.logged.outcome], case.logged


def _static(case: Case) -> tuple[Suspect, Verdict] | None:
    if case.report is None or case.report.ok:
        return None
    failed = case.report.failed
    broken = " and its answers are broken" if case.symptom and case.symptom.kind is Kind.BROKEN else ""
    what = f"the checkpoint fails {len(failed)} static check{'s' * (len(failed) != 1)} ({failed[0].id}){broken}"
    return Suspect.CHECKPOINT, _verdict(Outcome.CHECKPOINT_FAULT, what, f"sparkquant verify {shlex.quote(case.model)}")


def _symptom(case: Case) -> tuple[Suspect, Verdict] | None:
    if case.symptom is None:
        return None
    if case.symptom.kind is Kind.CONCURRENT:
        what = f"the same prompts are right alone and broken among {CONCURRENCY}: the weights are fine, a kernel is not"
        return Suspect.KERNEL, _verdict(Outcome.KERNEL_FAULT, what, _control(case))
    if case.symptom.kind is Kind.SILENT:
        what = "the server answers with errors: " + case.symptom.seen[-1]
        return Suspect.ENVIRONMENT, _verdict(
            Outcome.INCONCLUSIVE, what, "sparkquant diagnose --server-log FILE", ("answers to look at",)
        )
    return _broken(case) if case.symptom.kind is Kind.BROKEN else None


def _broken(case: Case) -> tuple[Suspect, Verdict]:
    """Structurally broken answers of a checkpoint in which nothing is found: a control decides."""
    tell = "structurally broken (other prompts and sampling settings will not help)"
    if case.report is None:
        what = f"{tell}; whether the checkpoint is sound is not known"
        model = shlex.quote(case.log.model) if case.log and case.log.model else "MODEL"
        return Suspect.NONE, _verdict(
            Outcome.INCONCLUSIVE, what, f"sparkquant diagnose {model} --url URL --server-log FILE", ("the checkpoint",)
        )
    graphs = case.log is not None and case.log.graphs and not case.known
    suspect = Suspect.EXECUTION if graphs else Suspect.KERNEL
    rows = f", and {case.known[0].id} is known of them" if case.known else ""
    ran = ", ".join(dict.fromkeys(k.kernel for k in case.log.kernels)) if case.log and case.log.kernels else "unknown"
    what = f"{tell}, the checkpoint is statically sound, kernels {ran}{rows}: a control on the same weights decides"
    missing = ("a control: the same weights in eager mode, and by another kernel",)
    return suspect, _verdict(Outcome.INCONCLUSIVE, what, _control(case), missing)


def _control(case: Case) -> str:
    """The run that tells kernel from execution: eager where graphs are on, another backend where they are off."""
    log = case.log
    if log is None:
        model = shlex.quote(case.model or "MODEL")
        return f"vllm serve {model} --enforce-eager  # then ask again; keep the log for --server-log"
    if log.graphs or not log.eager:
        return next_step.serve(log, enforce_eager=True)
    schemes = {kernel.scheme for kernel in log.kernels}
    if any(kernel.experts for kernel in log.kernels):
        return next_step.serve(log, moe_backend="emulation" if "nvfp4" in schemes else "triton")
    return next_step.serve(log, linear_backend="emulation" if "nvfp4" in schemes else "triton")


def _sound(case: Case) -> tuple[Suspect, Verdict]:
    """Nothing is broken as far as was looked; what was not looked at is missing."""
    missing = list(case.logged.missing) if case.logged else ["the server's log: which kernels ran"]
    if case.report is None:
        missing.append("the checkpoint: whether it is sound")
    if case.symptom is None:
        missing.append("answers of the server")
    model = shlex.quote(case.model or (case.log.model if case.log else "") or "MODEL")
    if case.logged is not None and case.logged.outcome is Outcome.INCONCLUSIVE:
        return Suspect.NONE, case.logged.model_copy(update={"missing": tuple(missing)})
    if case.logged is not None and case.symptom is None:
        return Suspect.NONE, case.logged
    if case.logged is not None:
        sound = "the checkpoint is sound, " if case.report is not None else ""
        what = f"{sound}the kernels ran, no answer is structurally broken: if answers are poor, quality was lost"
        return Suspect.QUALITY, _verdict(Outcome.PASS, what, f"sparkquant evaluate {model} --source SRC")
    what = "nothing is wrong as far as was looked; not seen: " + "; ".join(missing)
    ask = f"sparkquant diagnose {model} --url URL --server-log FILE"
    return Suspect.NONE, _verdict(Outcome.INCONCLUSIVE, what, ask, tuple(missing))
