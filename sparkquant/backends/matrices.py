"""The matrices inside a unit: one per Linear, two or one per expert of a fused tensor, and their largest magnitudes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from sparkquant.backends import Unit
from sparkquant.backends.planned import not_finite
from sparkquant.backends.planned import planned_scheme as planned_scheme
from sparkquant.decisions import Decision
from sparkquant.numerics.magnitude import absmax
from sparkquant.schemes import Scheme


def unit_matrices(unit: Unit, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Scheme, Tensor, float]]:
    """(module name, scheme, matrix [N, K], peak of its scale group) for everything in a unit.

    Only NVFP4 needs the peak, and only there it is looked for, with NonFiniteWeight naming tensor and index; for other
    schemes a pass over the weights would cost half as much as quantizing them, and it is 0.
    """
    wanted = any(planned_scheme(d).name == "nvfp4a16" for d in unit.decisions)
    peaks = unit_peaks(unit, weights) if wanted else [0.0] * (unit.last - unit.first)
    for index, peak in enumerate(peaks):
        for decision in unit.decisions:
            for module, matrix in decision_matrices(decision, weights[decision.tensor], index, unit.first + index):
                yield module, planned_scheme(decision), matrix, peak


def unit_peaks(unit: Unit, weights: Mapping[str, Tensor]) -> list[float]:
    """Largest magnitude of the unit's scale group, for each of its experts. Raises NonFiniteWeight."""
    peaks = [decision_peaks(d, weights[d.tensor], unit.first) for d in unit.decisions]
    return [max(values) for values in zip(*peaks, strict=True)]


def decision_matrices(decision: Decision, weight: Tensor, index: int, expert: int) -> Iterator[tuple[str, Tensor]]:
    """(module name, matrix) of one tensor; of a fused tensor those of `weight[index]`, which is expert `expert`."""
    if not decision.parts:
        yield decision.module, weight
        return
    parent = decision.module.rpartition(".")[0]
    for part, rows in zip(decision.parts, weight[index].chunk(len(decision.parts), dim=0), strict=True):
        yield f"{parent}.{expert}.{part}", rows


def decision_peaks(decision: Decision, weight: Tensor, first: int = 0) -> list[float]:
    """Largest magnitude of every matrix in `weight`; NonFiniteWeight at the first NaN or infinity."""
    peaks = []
    for index, matrix in enumerate(weight if decision.parts else (weight,)):
        peak, bad = absmax(matrix)
        if bad is not None:
            position = [first + index, *bad] if decision.parts else list(bad)
            raise not_finite(decision.tensor, position, matrix[tuple(bad)].item())
        peaks.append(peak)
    return peaks
