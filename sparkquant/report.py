"""Results of checks: what was looked at, what was found, and whether it may be published."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """`inconclusive` means that an observable was missing; it is never a pass."""

    PASS = "pass"
    FAIL = "fail"
    WARN = "warn"
    INCONCLUSIVE = "inconclusive"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding under a stable id. `tensors` names the places (at most a few dozen), `message` says what and why."""

    id: str
    status: Status
    message: str
    tensors: tuple[str, ...] = ()
    measured: Any = None
    expected: Any = None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; absent measurements are left out."""
        fields: dict[str, Any] = {
            "id": self.id,
            "status": str(self.status),
            "message": self.message,
            "tensors": list(self.tensors),
        }
        if self.measured is not None:
            fields["measured"] = self.measured
        if self.expected is not None:
            fields["expected"] = self.expected
        return fields


@dataclass(frozen=True)
class Report:
    """All checks of one run over one `subject`."""

    subject: str
    checks: tuple[Check, ...] = field(default_factory=tuple)

    @classmethod
    def of(cls, subject: str, checks: Iterable[Check]) -> Report:
        """A report from any iterable of checks."""
        return cls(subject, tuple(checks))

    @property
    def failed(self) -> tuple[Check, ...]:
        """Checks that are red."""
        return tuple(check for check in self.checks if check.status is Status.FAIL)

    @property
    def ok(self) -> bool:
        """No red check; warnings do not count."""
        return not self.failed

    def as_json(self) -> list[dict[str, Any]]:
        """The checks as plain JSON."""
        return [check.as_json() for check in self.checks]

    def to_json(self) -> str:
        """Stable text."""
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n"
