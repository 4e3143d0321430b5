"""Whether the engine can split the model over the ranks that were named, quantized or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sparkquant.engine.ranks import ALWAYS, Shared, letters_of
from sparkquant.report import Check
from sparkquant.sizes import sizes_of
from sparkquant.verification.catalogue import finding
from sparkquant.verification.subject import Subject


def check_ranks(subject: Subject) -> Iterator[Check]:
    """rules.ranks; of a family that no layout knows only what the engine asks of every config.json."""
    shared = _shared(subject)
    for size in subject.serving.tp:
        if faults := list(shared.faults(size)):
            yield finding("rules.ranks", f"tensor parallel {size}: {'; '.join(faults)}; {shared.fitting}")


def unsplittable(subject: Subject, tp: Iterable[int]) -> dict[int, str]:
    """The sizes that cannot be had, each with the first reason."""
    return _shared(subject).unsplittable(tp)


def _shared(subject: Subject) -> Shared:
    if subject.layout is None:
        return Shared(sizes_of(subject.config, {}), ALWAYS)
    return Shared(subject.layout.sizes, letters_of(placement.rule for placement in subject.placements.values()))
