"""What was proven: one outcome with its evidence and the next command, from a log alone or from a whole gate run."""

from __future__ import annotations

from enum import StrEnum

from sparkquant import errors
from sparkquant.marlin.noun import Noun


class Outcome(StrEnum):
    """PASS            the path ran, and nothing that was looked at speaks against it
    KERNEL_FAULT      another kernel ran than the one asked for, kernels disagree on the same weights, or the same
                      prompts are right alone and wrong among others (the documented Marlin fault on 12.x)
    EXECUTION_FAULT   eager is right, CUDA graphs are wrong
    CHECKPOINT_FAULT  kernels agree with each other, and not with the reference; or the engine refuses the checkpoint
    ENVIRONMENT_FAULT an import error, no GPU, no memory: says nothing of kernel or checkpoint
    INCONCLUSIVE      an observable is missing
    """

    PASS = "pass"
    KERNEL_FAULT = "kernel-fault"
    EXECUTION_FAULT = "execution-fault"
    CHECKPOINT_FAULT = "checkpoint-fault"
    ENVIRONMENT_FAULT = "environment-fault"
    INCONCLUSIVE = "inconclusive"


EXITS = {
    Outcome.PASS: 0,
    Outcome.KERNEL_FAULT: errors.CheckFailed.exit_code,
    Outcome.EXECUTION_FAULT: errors.CheckFailed.exit_code,
    Outcome.CHECKPOINT_FAULT: errors.CheckFailed.exit_code,
    Outcome.ENVIRONMENT_FAULT: errors.EnvironmentMissing.exit_code,
    Outcome.INCONCLUSIVE: errors.Inconclusive.exit_code,
}


class Evidence(Noun):
    """One observation.

    points  the outcome that it speaks for; None where it is only context
    source  where it comes from: `log`, `static`, `coherence`, `control`, `metrics`, `machine` or `table`
    where   `line 31`, a run's name, a check id, a file
    """

    what: str
    source: str
    where: str = ""
    points: Outcome | None = None


class Verdict(Noun):
    """`missing` names observables that would have been needed; `next` is one command or action, never empty."""

    outcome: Outcome
    summary: str
    evidence: tuple[Evidence, ...]
    next: str
    missing: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Of the command line: 0, 4 for a fault of kernel, execution or checkpoint, 5 environment, 7 inconclusive."""
        return EXITS[self.outcome]
