"""The runs of the gate against each other and against the reference, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sparkquant.marlin.controls import Observation, Role
from sparkquant.marlin.noun import Noun
from sparkquant.marlin.numbers import Divergence, Position, divergence
from sparkquant.marlin.prompts import Prompts


class Lengths(Noun):
    """Mean tokens of the answers and how many ended by themselves; of the reference 0 where there is none."""

    mean: float
    stops: int
    reference: float
    reference_stops: int


class Agreement(Noun):
    """Greedy answers of two runs: reported, never demanded (atomic adds make equal runs differ by design).

    equal     answers that are the same token by token
    first     tokens before the first difference, the mean over those that differ; None where none does
    """

    asked: int
    equal: int
    first: float | None


@dataclass(frozen=True)
class Comparisons:
    """controls: candidate || control; to_reference: reference || run. None where one of them sent no scores."""

    controls: Mapping[Role, Divergence | None] = field(default_factory=dict)
    to_reference: Mapping[Role, Divergence | None] = field(default_factory=dict)
    answers: Mapping[Role, Agreement] = field(default_factory=dict)
    reference_lengths: tuple[float, int] = (0.0, 0)

    @property
    def floor(self) -> float | None:
        """Nats between two equal runs."""
        found = self.controls.get(Role.REPEAT)
        return None if found is None else found.kl


def compare(
    seen: Mapping[Role, Observation],
    prompts: Prompts,
    reference: Sequence[Sequence[Position]] | None,
    reference_lengths: tuple[float, int],
) -> Comparisons:
    """All comparisons that the runs allow. `reference` holds its scores, from a run or from a record."""
    candidate = seen[Role.CANDIDATE]
    mine = _scores(candidate)
    controls: dict[Role, Divergence | None] = {}
    near: dict[Role, Divergence | None] = {}
    answers: dict[Role, Agreement] = {}
    for role, run in seen.items():
        if run.failed or role is Role.REFERENCE:
            continue
        if role is not Role.CANDIDATE:
            controls[role] = divergence(mine, _scores(run), prompts.rows) if mine and _scores(run) else None
            answers[role] = _agreement(candidate, run)
        if reference is not None:
            near[role] = divergence(reference, _scores(run), prompts.rows) if reference and _scores(run) else None
    return Comparisons(controls, near, answers, reference_lengths)


def _scores(run: Observation) -> Sequence[Sequence[Position]]:
    return [] if run.scoring or run.failed else run.scores


def lengths_of(run: Observation) -> tuple[float, int]:
    """(mean length, answers that ended by themselves) when asked one by one, or at all."""
    answers = [a for a in next(iter(run.answers.values()), ()) if not a.error]
    mean = sum(answer.tokens for answer in answers) / len(answers) if answers else 0.0
    return mean, sum(answer.finish_reason == "stop" for answer in answers)


def lengths(seen: Mapping[Role, Observation], reference: tuple[float, int]) -> Lengths:
    """Of candidate and reference."""
    mean, stops = lengths_of(seen[Role.CANDIDATE])
    return Lengths(mean=mean, stops=stops, reference=reference[0], reference_stops=reference[1])


def _agreement(a: Observation, b: Observation) -> Agreement:
    left, right = next(iter(a.answers.values()), ()), next(iter(b.answers.values()), ())
    pairs = [(x.token_ids, y.token_ids) for x, y in zip(left, right, strict=False) if not (x.error or y.error)]
    first = [_common(x, y) for x, y in pairs if x != y]
    return Agreement(
        asked=len(pairs), equal=sum(x == y for x, y in pairs), first=sum(first) / len(first) if first else None
    )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
