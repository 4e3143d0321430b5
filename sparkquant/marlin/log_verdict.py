"""`judge_log`: what a log alone proves. It never speaks of the output: a log does not hold it.

In this order: what ended the engine; what the engine warned of; whether the kernels that ran are those asked for;
what is missing; whether Marlin ran where it could.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sparkquant.marlin import next_step
from sparkquant.marlin.log import kernel_family
from sparkquant.marlin.server_log import End, Engine, Fault, KernelLine, Model, Phase, ServerLog
from sparkquant.marlin.verdict import Evidence, Outcome, Verdict

WEIGHT_ONLY = ("int", "nvfp4", "mxfp4")
"""Schemes that Marlin is for. FP8 has units of its own from capability 8.9 on."""
AFTER_MARLIN = {"int": ("conch", "exllama", "triton", "emulation"), "nvfp4": ("fbgemm", "emulation")}
"""Families that come after Marlin in the automatic choice: one of them means that Marlin refused the layer."""
ORDER = (Outcome.KERNEL_FAULT, Outcome.EXECUTION_FAULT, Outcome.CHECKPOINT_FAULT, Outcome.ENVIRONMENT_FAULT)
"""Identity first: nothing else counts where another kernel ran."""


def judge_log(log: ServerLog, *, wanted: Mapping[str, str] | None = None, alive: bool = False) -> Verdict:
    """The verdict on one log.

    wanted  scheme -> kernel family that must have run, beside what the log's own settings ask for; another is a
            kernel fault. Without it, another kernel than Marlin by automatic choice leaves Marlin unproven
    alive   somebody else saw the server answer after the last line, so its end need not be in the log
    """
    evidence = tuple(_evidence(log))
    found = (
        _ended(log, evidence)
        or _warned(log, evidence)
        or _other_kernel(log, wanted or {}, evidence)
        or _incomplete(log, wanted or {}, alive, evidence)
        or _not_marlin(log, evidence)
    )
    if found is not None:
        return found
    ran = ", ".join(f"{k.family} for {k.scheme}{' experts' if k.experts else ''}" for k in _main(log))
    return Verdict(
        outcome=Outcome.PASS,
        summary=f"{ran}; started, served and ended in order. Whether the output is right, a log does not say",
        evidence=evidence,
        next=next_step.validate(log),
    )


def _main(log: ServerLog) -> list[KernelLine]:
    return [kernel for kernel in log.kernels if kernel.model is Model.MAIN and kernel.scheme != "none"]


def _evidence(log: ServerLog) -> Iterator[Evidence]:
    """Everything worth citing, in the order of the lines."""
    found: list[tuple[int, Evidence]] = []
    for kernel in log.kernels:
        whose = " (drafter)" if kernel.model is Model.DRAFTER else ""
        experts = " experts" if kernel.experts else ""
        found.append((kernel.line, _line(kernel.line, f"{kernel.scheme}{experts}{whose}: {kernel.text}")))
    for notice in log.notices:
        found.append(
            (
                notice.line,
                _line(notice.line, f"{notice.text} ({notice.meaning})", notice.points if notice.fails else None),
            )
        )
    for fault in log.faults:
        at = f", noticed at {fault.at}" if fault.at else ""
        kind = "" if fault.fatal else "caught: "
        found.append(
            (
                fault.line,
                _line(fault.line, f"{kind}{fault.text} ({fault.meaning}; during {fault.phase}{at})", fault.points),
            )
        )
    yield from (item for _, item in sorted(found, key=lambda pair: pair[0]))


def _line(number: int, what: str, points: Outcome | None = None) -> Evidence:
    return Evidence(what=what, source="log", where=f"line {number}", points=points)


def _ended(log: ServerLog, evidence: tuple[Evidence, ...]) -> Verdict | None:
    """The first fatal fault that says something; one that says nothing leaves the run unproven."""
    if not log.fatal:
        return None
    fault = next((fault for fault in log.fatal if fault.points is not Outcome.INCONCLUSIVE), log.fatal[0])
    detail = f": {next_step.ASYNCHRONOUS}" if _asynchronous(fault) else ""
    return Verdict(
        outcome=fault.points,
        summary=f"ended during {fault.phase}: {fault.text}: {fault.meaning}{detail}",
        evidence=evidence,
        next=next_step.after_fault(log, fault),
        missing=("why the engine ended",) if fault.points is Outcome.INCONCLUSIVE else (),
    )


def _asynchronous(fault: Fault) -> bool:
    return fault.points is Outcome.KERNEL_FAULT


def _warned(log: ServerLog, evidence: tuple[Evidence, ...]) -> Verdict | None:
    for outcome in ORDER:
        notices = [notice for notice in log.failing if notice.points is outcome]
        if notices:
            told = "; ".join(dict.fromkeys(f"{n.meaning}{f' ({n.detail})' if n.detail else ''}" for n in notices))
            return Verdict(
                outcome=outcome, summary=told, evidence=evidence, next=_after_notice(log, outcome, notices[0].id)
            )
    return None


def _after_notice(log: ServerLog, outcome: Outcome, id: str) -> str:
    if outcome is Outcome.ENVIRONMENT_FAULT:
        names = [notice.detail for notice in log.failing if notice.id == "variable.unknown"]
        return (
            " ".join(["env", *(f"-u {name}" for name in names), next_step.serve(log)]) if names else "sparkquant doctor"
        )
    if id == "fallback.backend":
        return next_step.serve(log, linear_backend=None) + "  # or name a backend for each scheme with --kernel-config"
    return next_step.verify(log)


def _other_kernel(log: ServerLog, wanted: Mapping[str, str], evidence: tuple[Evidence, ...]) -> Verdict | None:
    """Kernels that are not those asked for, or that come after Marlin because Marlin refused."""
    for kernel in _main(log):
        asked = _asked(log, kernel, wanted)
        if asked and kernel.family != asked:
            what = (
                f"{asked} was asked for, {kernel.family} ran for {kernel.scheme}{' experts' if kernel.experts else ''}"
            )
        elif not asked and kernel.family in _refused(log, kernel):
            what = f"{kernel.family} ran for {kernel.scheme}: Marlin, which comes before it, refused without an error"
        else:
            continue
        return Verdict(
            outcome=Outcome.KERNEL_FAULT,
            summary=f"{what} ({kernel.text})",
            evidence=evidence,
            next=next_step.verify(log),
        )
    return None


def _refused(log: ServerLog, kernel: KernelLine) -> tuple[str, ...]:
    if kernel.scheme == "int" and log.dialect in ("0.25", "0.26"):
        return (*AFTER_MARLIN["int"], "humming")
    return AFTER_MARLIN.get(kernel.scheme, ())


def _asked(log: ServerLog, kernel: KernelLine, wanted: Mapping[str, str]) -> str:
    """The family that had to run these layers; "" where the choice was the engine's."""
    backend = log.moe_backend if kernel.experts else log.linear_backend
    if kernel.scheme in wanted:
        return wanted[kernel.scheme]
    return kernel_family(backend) if backend not in ("", "auto") and log.engine is Engine.VLLM else ""


def _incomplete(
    log: ServerLog, wanted: Mapping[str, str], alive: bool, evidence: tuple[Evidence, ...]
) -> Verdict | None:
    """An incomplete log proves nothing."""
    missing = list(log.missing)
    missing += [f"a kernel line for {scheme}" for scheme in wanted if not log.families(scheme)]
    caught = [fault for fault in log.faults if not fault.fatal and fault.phase not in (Phase.SERVING, Phase.SHUTDOWN)]
    if caught:
        missing.append(f"the part of the start-up that failed and was skipped: {caught[0].text}")
    if not log.requests and not alive:
        missing.append("a request that reached the model")
    if log.end is End.NONE and not alive:
        missing.append("the end of the process: it may still run, or it was killed without a word")
    if log.truncated:
        missing.append("the rest of the last line")
    missing += [notice.meaning for notice in log.failing if notice.points is Outcome.INCONCLUSIVE]
    if not missing:
        return None
    return Verdict(
        outcome=Outcome.INCONCLUSIVE,
        summary="the log does not hold " + "; ".join(missing),
        evidence=evidence,
        next=_complete_it(log, caught),
        missing=tuple(missing),
    )


def _complete_it(log: ServerLog, caught: list[Fault]) -> str:
    if caught:
        return next_step.after_fault(log, caught[0])
    if log.engine is Engine.SGLANG:
        return f"sparkquant diagnose {log.model or 'MODEL'} --url URL  # SGLang does not log which kernel runs"
    then = "  # let it start, send one request, stop it with Ctrl-C, and pass the whole log again"
    return next_step.serve(log) + then


def _not_marlin(log: ServerLog, evidence: tuple[Evidence, ...]) -> Verdict | None:
    """A clean run of another kernel: nothing is wrong, and nothing is proven of Marlin."""
    other = [k for k in _main(log) if k.scheme in WEIGHT_ONLY and k.family != "marlin" and not _asked(log, k, {})]
    if not other and _main(log):
        return None
    if not other:
        what, again = "nothing is quantized here", next_step.verify(log)
    else:
        ran = ", ".join(dict.fromkeys(f"{k.family} for {k.scheme}" for k in other))
        what = f"another kernel than Marlin was chosen automatically ({ran}): this run proves nothing of Marlin"
        again = (
            next_step.serve(log, moe_backend="marlin")
            if other[0].experts
            else next_step.serve(log, linear_backend="marlin")
        )
    return Verdict(
        outcome=Outcome.INCONCLUSIVE, summary=what, evidence=evidence, next=again, missing=("a Marlin kernel line",)
    )
