"""Every error that a user can cause or meet, with the exit code of the command line.

    SparkquantError                 1  (a bug, when raised directly)
    ├── PlanViolation               1  the writer was handed bytes that the plan does not describe
    ├── UsageError                  2  a wrong argument, an existing output folder
    │   ├── RecipeError             2  a recipe that cannot be read or does not make sense
    │   ├── PlanError               2  a recipe that does not fit this checkpoint
    │   └── CalibrationError        2  calibration data that cannot serve
    ├── CheckpointError             3  a folder that cannot be read as a checkpoint
    │   ├── UnknownFamily           3  no layout for this model_type
    │   ├── UnknownTensor           3  a tensor name that the layout does not know
    │   ├── UnsupportedFormat       3  a quant_method that no reader knows
    │   ├── QuantizedSource         3  the source is quantized already
    │   └── NonFiniteWeight         3  NaN or infinity among the source weights
    ├── CheckFailed                 4  a check of verify, evaluate or validate is red
    ├── EnvironmentMissing          5  a package, device or engine that is not there
    ├── Resumable                   6  stopped half-way; the same command goes on
    └── Inconclusive                7  an observable was missing, so nothing was proven

Each carries the next step (`hint`); the ones that can find several faults carry all of them (`problems`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 50
"""Problems that the text of an error lists; `problems` holds all of them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: where it is (`file:line:col`, a tensor, a path), what is wrong, and what to do about it."""

    where: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}" + (f"; {self.hint}" if self.hint else "")


class SparkquantError(Exception):
    """Base class. `what` names the fault, `hint` the next step, `problems` all single faults found."""

    exit_code = 1

    def __init__(self, what: str, *, hint: str, problems: Sequence[Problem] = ()) -> None:
        self.what = what
        self.hint = hint
        self.problems = tuple(problems)
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what, *(f"  {problem}" for problem in self.problems[:SHOWN])]
        if len(self.problems) > SHOWN:
            lines.append(f"  and {len(self.problems) - SHOWN} more")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class PlanViolation(SparkquantError):
    """The executed result differs from the plan: a bug, never written to disk."""


class UsageError(SparkquantError):
    exit_code = 2


class RecipeError(UsageError):
    """All faults of one recipe, each with `file:line:col`."""


class PlanError(UsageError):
    """All reasons why this recipe cannot be applied to this checkpoint."""


class CalibrationError(UsageError):
    """Calibration data that is missing, too small or unlike its declaration."""


class CheckpointError(SparkquantError):
    exit_code = 3


class UnknownFamily(CheckpointError):
    """The `model_type` has no layout."""


class UnknownTensor(CheckpointError):
    """A checkpoint holds names that its family's layout does not classify."""


class UnsupportedFormat(CheckpointError):
    """The `quant_method` of a quantized checkpoint has no reader."""


class QuantizedSource(CheckpointError):
    """The source holds quantized weights; quantizing them again would lose more than it says."""


class NonFiniteWeight(CheckpointError):
    """A source weight is NaN or infinite."""


class CheckFailed(SparkquantError):
    exit_code = 4


class EnvironmentMissing(SparkquantError):
    exit_code = 5


class Resumable(SparkquantError):
    exit_code = 6


class Inconclusive(SparkquantError):
    exit_code = 7
