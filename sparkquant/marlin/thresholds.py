"""The limits by which a validate run is judged, and where each comes from."""

from __future__ import annotations

from sparkquant.accept import Accept
from sparkquant.marlin.noun import Noun

CONTROL_KL = 0.01
"""Nats between runs on the same weights. Measured with vLLM 0.25.1 on one H200 (sm_90), a model of 32 M parameters and
16,352 positions (tests/marlin/records): int4 to itself and to atomic adds off exactly 0, to Machete 0.00013, to eager
0.00016, among eight 0.00010; NVFP4 with FP8 to its run with drafts 0.00058, the most of all; random weights on which
atomic adds act 0.00028 between equal runs. The limit is 17 times the most, because that model has eight layers, and a
twelfth of what a scale tensor that is three times too large costs (0.128)."""
FLOOR_FACTOR = 10.0
"""Controls may differ so many times as much as two runs of the same command do."""
REFERENCE_KL = 0.1
"""Nats from the reference where the recipe sets no kl_mean. In the runs above: int4 0.0156, NVFP4 with FP8 0.0119,
NVFP4 in the MLPs alone 0.0059, int4 with one scale tensor three times too large 0.128."""
ACCEPTANCE_DROP = 0.2
"""Share of drafts at the first position. In the runs above: 0.951 with the reference, 0.904 to 0.940 with the results,
0.917 with one scale tensor three times too large (so it does not find those), 0 with a draft head of noise."""
ACCEPTANCE_SHARE, ACCEPTANCE_LEAST = 0.5, 0.2
"""A drafter below half of the reference's rate, or below a fifth, costs more than it brings."""
FEWEST_DRAFTS = 50
"""With fewer a rate says nothing."""
LENGTH_GROWTH = 0.5
"""Share by which answers may be longer: a warning, not a fault (quantized thinking models tend to think longer)."""
STOPS_SHARE = 0.5
"""Answers that end by themselves, as a share of those of the reference that do."""


class Thresholds(Noun):
    """`stated` names those that the recipe set; the others are defaults."""

    control_kl: float = CONTROL_KL
    floor_factor: float = FLOOR_FACTOR
    reference_kl: float = REFERENCE_KL
    acceptance_drop: float = ACCEPTANCE_DROP
    acceptance_share: float = ACCEPTANCE_SHARE
    acceptance_least: float = ACCEPTANCE_LEAST
    fewest_drafts: int = FEWEST_DRAFTS
    length_growth: float = LENGTH_GROWTH
    stops_share: float = STOPS_SHARE
    stated: tuple[str, ...] = ()

    def between_controls(self, floor: float | None) -> float:
        """Nats that two runs of the same weights may differ; `floor` is what two equal runs differ."""
        return max(self.control_kl, self.floor_factor * (floor or 0.0))


_OF_RECIPE = {
    "kl_mean": "reference_kl", "mtp_acceptance_drop": "acceptance_drop", "control_kl": "control_kl",
    "length_growth": "length_growth",
}  # fmt: skip


def thresholds_of(accept: Accept | None) -> Thresholds:
    """The recipe's limits, and the defaults for what it does not set."""
    given = {} if accept is None else accept.model_dump(exclude_none=True)
    stated = {_OF_RECIPE[name]: value for name, value in given.items() if name in _OF_RECIPE}
    return Thresholds(**stated, stated=tuple(sorted(stated)))
