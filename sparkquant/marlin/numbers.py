"""How far two runs are apart on the same rows, from the log probabilities that a server sends: the top of each list.

A server sends the K most likely tokens of every position and the one that stands there, not the whole vocabulary. Let S
be the tokens that both sides sent. The rest of either side is one lump:

    KL >= sum over S of p log(p/q) + P(rest) log(P(rest)/Q(rest))

by the data processing inequality: what is reported as `kl` is a lower bound, exact where the rest is alike. No upper
bound exists without the rest; `kl_high` adds P(rest) times the largest |log(p/q)| that was seen at the position, an
upper bound as long as no unseen token is further off than the furthest seen one. `unseen` is the mean of P(rest).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sparkquant.marlin.noun import Noun

Position = Mapping[int, float]
"""Log probabilities (nats) of some tokens at one position: the most likely ones, and the one that stands there."""
Row = Sequence[Position]

TINY = 1e-9
"""Mass below which a rest is rounding."""
CLAMPED = -9999.0
"""What vLLM sends for minus infinity."""


class Divergence(Noun):
    """Nats per token of `a` || `b`: means over rows that count once each, standard error over rows (None for one row).

    p99      99th percentile over positions
    top1     share of positions with the same most likely token
    nll      of the rows' own tokens, in either run
    unseen   mean probability of `a` outside of what both runs sent
    """

    rows: int
    positions: int
    kl: float
    kl_se: float | None
    kl_high: float
    p99: float
    top1: float
    nll: tuple[float, float]
    unseen: float


def divergence(a: Sequence[Row], b: Sequence[Row], rows: Sequence[Sequence[int]]) -> Divergence | None:
    """Compare two runs over the same rows of token ids; None when nothing can be compared."""
    means: list[float] = []
    every: list[float] = []
    high = unseen = agree = 0.0
    nll = [0.0, 0.0]
    for left, right, ids in zip(a, b, rows, strict=True):
        if not left or len(left) != len(right):
            continue
        found = [_position(p, q) for p, q in zip(left, right, strict=True)]
        every += [kl for kl, _, _ in found]
        means.append(sum(kl for kl, _, _ in found) / len(found))
        high += sum(upper for _, upper, _ in found) / len(found)
        unseen += sum(rest for _, _, rest in found)
        agree += sum(_first(p) == _first(q) for p, q in zip(left, right, strict=True))
        for side, given in enumerate((left, right)):
            nll[side] -= sum(position[token] for position, token in zip(given, ids[1:], strict=False))
    if not means:
        return None
    mean = sum(means) / len(means)
    error = None
    if len(means) > 1:
        error = math.sqrt(sum((value - mean) ** 2 for value in means) / (len(means) - 1) / len(means))
    count = len(every)
    return Divergence(
        rows=len(means), positions=count, kl=mean, kl_se=error, kl_high=high / len(means),
        p99=sorted(every)[int(0.99 * (count - 1))], top1=agree / count, nll=(nll[0] / count, nll[1] / count),
        unseen=unseen / count,
    )  # fmt: skip


def _position(p: Position, q: Position) -> tuple[float, float, float]:
    """(KL with the rest as one lump, the same with the rest at its worst seen ratio, P of the rest)"""
    shared = p.keys() & q.keys()
    kl = mass = other = worst = 0.0
    for token in shared:
        # vLLM's own bound for minus infinity: the difference of two infinities is no number.
        here, there = max(p[token], CLAMPED), max(q[token], CLAMPED)
        probability, ratio = math.exp(here), here - there
        kl += probability * ratio
        mass += probability
        other += math.exp(there)
        worst = max(worst, abs(ratio))
    rest, rest_other = max(0.0, 1.0 - mass), max(0.0, 1.0 - other)
    upper = kl + rest * worst
    if rest > TINY:
        kl += rest * math.log(rest / max(rest_other, TINY))
    return max(0.0, kl), max(0.0, upper, kl), rest


def _first(position: Position) -> int:
    return max(position, key=lambda token: (position[token], -token))
