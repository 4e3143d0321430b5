"""What `sparkquant calibration check` shows: counts, lengths, findings, and a few rows as the model would read them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sparkquant.calibration.calibration_set import CalibrationSet
from sparkquant.calibration.loading import Model, Spec, make_calibration, opened, wish_of
from sparkquant.calibration.template import ChatTemplate
from sparkquant.errors import Problem
from sparkquant.report import Check, Status


@dataclass(frozen=True, slots=True)
class Sample:
    """One row as text, special tokens included."""

    source: str
    tokens: int
    text: str


@dataclass(frozen=True)
class CalibrationCheck:
    """A calibration that was made to be looked at. `samples` hold the user's text: shown on request, never stored."""

    calibration: CalibrationSet
    samples: tuple[Sample, ...] = ()

    @property
    def checks(self) -> tuple[Check, ...]:
        """Findings; a red one means that `load_calibration` would refuse."""
        return self.calibration.checks

    @property
    def ok(self) -> bool:
        """Nothing would be refused."""
        return not any(check.status is Status.FAIL for check in self.checks)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Every dropped item with its place and reason."""
        return self.calibration.problems

    def as_json(self) -> dict[str, Any]:
        """One plain JSON document: the record, the findings in words, dropped items, and samples if asked for."""
        return {
            **self.calibration.record(),
            "ok": self.ok,
            "checks": [check.as_json() for check in self.checks],
            "problems": [{"where": problem.where, "what": problem.what} for problem in self.problems],
            "samples": [{"source": s.source, "tokens": s.tokens, "text": s.text} for s in self.samples],
        }


def check_calibration(
    spec: Spec,
    model: Model,
    *,
    rows: int | None = None,
    tokens: int | None = None,
    seed: int | None = None,
    allow: Collection[str] = (),
    show: int = 0,
) -> CalibrationCheck:
    """Make the rows and say what is wrong with them instead of refusing. `show` renders that many rows as text."""
    checkpoint = opened(model)
    calibration, template = make_calibration(spec, checkpoint, wish_of(rows, tokens, seed), allow)
    if show > 0 and template is None:
        template = ChatTemplate.open(checkpoint.path)
    samples = _samples(calibration, template, show) if template else ()
    return CalibrationCheck(calibration, samples)


def _samples(calibration: CalibrationSet, template: ChatTemplate, show: int) -> tuple[Sample, ...]:
    """Rows of different sources first: three samples of one source say little about a mix."""
    turn: dict[str, int] = {}
    order = []
    for index, source in enumerate(calibration.sources):
        turn[source] = turn.get(source, 0) + 1
        rank = hashlib.sha256(source.encode()).hexdigest()
        order.append((turn[source], rank, index))
    chosen = [index for _, _, index in sorted(order)[: max(show, 0)]]
    return tuple(
        Sample(calibration.sources[i], len(calibration.rows[i]), template.decode(calibration.rows[i])) for i in chosen
    )
