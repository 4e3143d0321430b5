"""`Validation`: everything that a gate run did and saw, as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sparkquant.marlin.comparing import Comparisons
from sparkquant.marlin.controls import CONCURRENCY, TOP, Observation, Role
from sparkquant.marlin.preflight import Preflight
from sparkquant.marlin.thresholds import Thresholds
from sparkquant.marlin.verdict import Outcome, Verdict
from sparkquant.report import Check, Status

STATUS = {Outcome.PASS: Status.PASS, Outcome.INCONCLUSIVE: Status.INCONCLUSIVE,
          Outcome.ENVIRONMENT_FAULT: Status.INCONCLUSIVE}  # fmt: skip
"""Of a published record; every other outcome is a failure."""


@dataclass(frozen=True)
class Validation:
    """One gate run.

    conditions  what the numbers depend on: engine, capability, GPUs, driver, prompts, arguments, environment
    reference   where the reference's numbers come from: `run`, `record`, or "" without one
    soak        what the soak showed, None without one
    """

    out: str
    verdict: Verdict
    conditions: Mapping[str, Any]
    preflight: Preflight
    seen: Mapping[Role, Observation]
    compared: Comparisons | None
    thresholds: Thresholds
    reference: str = ""
    soak: Mapping[str, Any] | None = None
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        """Nothing else than a pass is one."""
        return self.verdict.outcome is Outcome.PASS

    @property
    def status(self) -> Status:
        """Of the record."""
        return STATUS.get(self.verdict.outcome, Status.FAIL)

    @property
    def checks(self) -> tuple[Check, ...]:
        """The verdict as a check, for reports."""
        return (Check("validate.verdict", self.status, self.verdict.summary, measured=str(self.verdict.outcome)),)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        told = self.compared
        return {
            "out": self.out,
            "ok": self.ok,
            "verdict": {**self.verdict.model_dump(mode="json"), "exit_code": self.verdict.exit_code},
            "conditions": dict(self.conditions),
            "preflight": {
                "ok": self.preflight.report.ok, "failed": [check.as_json() for check in self.preflight.report.failed],
                "kernels": dict(self.preflight.table), "atomic_add": self.preflight.atomic_add,
            },
            "thresholds": self.thresholds.model_dump(mode="json"),
            "reference": self.reference,
            "runs": {str(role): run_json(run) for role, run in self.seen.items()},
            "to_controls": {} if told is None else _numbers(told.controls),
            "to_reference": {} if told is None else _numbers(told.to_reference),
            "greedy_agreement": {} if told is None else _numbers(told.answers),
            "reference_lengths": [] if told is None else list(told.reference_lengths),
            "soak": self.soak if self.soak is None else dict(self.soak),
            "notes": list(self.notes),
            "checks": [check.as_json() for check in self.checks],
        }  # fmt: skip


def _numbers(found: Mapping[Role, Any]) -> dict[str, Any]:
    return {str(role): None if value is None else value.model_dump(mode="json") for role, value in found.items()}


def run_json(run: Observation) -> dict[str, Any]:
    """One run without its texts."""
    log = run.log
    return {
        "arguments": list(run.settings.arguments), "environment": dict(run.settings.environment),
        "failed": run.failed, "died": run.died, "version": run.version, "start_seconds": round(run.seconds, 1),
        "kernels": [] if log is None else [
            {"kernel": k.kernel, "scheme": k.scheme, "experts": k.experts, "model": str(k.model)} for k in log.kernels
        ],
        "notices": [] if log is None else [notice.text for notice in log.notices if notice.fails],
        "eager": None if log is None else log.eager, "graphs": None if log is None else log.graphs,
        "attention": "" if log is None else log.attention,
        "load_gib": None if log is None else log.load_gib,
        "kv_cache_gib": None if log is None else log.kv_cache_gib,
        "kv_cache_tokens": None if log is None else log.kv_cache_tokens,
        "max_concurrency": None if log is None else log.max_concurrency,
        "max_model_len": None if log is None else log.max_model_len,
        "answers": {str(c): _answers(run, c) for c in run.answers},
        "scoring": run.scoring,
        "acceptance": None if run.acceptance is None else {
            **run.acceptance.model_dump(mode="json"), "length": round(run.acceptance.length, 4)},
        "acceptance_by_kind": {kind: found.model_dump(mode="json") for kind, found in run.by_kind.items()},
        "corrupted_requests": run.corrupted, "preemptions": run.preempted,
    }  # fmt: skip


def _answers(run: Observation, concurrency: int) -> dict[str, Any]:
    answers = run.answers[concurrency]
    good = [answer for answer in answers if not answer.error]
    return {
        "asked": len(answers), "failed": len(answers) - len(good),
        "mean_tokens": round(sum(answer.tokens for answer in good) / len(good), 2) if good else None,
        "ended": sum(answer.finish_reason == "stop" for answer in good),
        "findings": {str(number): [f.model_dump(mode="json") for f in found]
                     for number, found in run.findings(concurrency).items()},
    }  # fmt: skip


def conditions_of(**given: Any) -> dict[str, Any]:
    """The conditions of a run, with the constants of this module and the version of this code."""
    from sparkquant import version

    plain = {key: asdict(value) if hasattr(value, "__dataclass_fields__") else value for key, value in given.items()}
    return {"sparkquant": version(), **plain, "top_logprobs": TOP, "concurrency": CONCURRENCY}
