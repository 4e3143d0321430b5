"""Which tensor-parallel sizes the engine can split a model into at all, by the heads and widths in config.json.

All versions that were read agree here, and none asks whether a weight is quantized: with a size that does not fit the
engine stops while it builds the model. Kernels are another question, see `engine.routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparkquant.layers import LayerClass as C
from sparkquant.layers import TensorRule

USUAL_SIZES = (1, 2, 4, 8, 16)
"""Sizes that a hint tries."""

VOCABULARY_STEP = 64
"""Embedding and lm_head are padded to a multiple of this before they are split."""

_REPLICATED = frozenset({C.VISION, C.AUDIO, C.MTP})
"""Regions that do not decide: towers can run unsplit, and the draft head has the decoder's sizes."""


def _evenly(count: int, ranks: int) -> bool:
    return count % ranks == 0


def _evenly_or_repeated(count: int, ranks: int) -> bool:
    return count % ranks == 0 if count >= ranks else ranks % count == 0


def _evenly_or_one(count: int, ranks: int) -> bool:
    return count == 1 or count % ranks == 0


def _evenly_padded(count: int, ranks: int) -> bool:
    return -(-count // VOCABULARY_STEP) * VOCABULARY_STEP % ranks == 0


@dataclass(frozen=True, slots=True)
class Split:
    """What ranks share: its name in words, when it fits, and what is wrong with it otherwise."""

    what: str
    fits: Callable[[int, int], bool] = _evenly
    fault: str = "does not divide over {ranks} ranks"


SPLITS: Mapping[str, Split] = {
    "A": Split("the number of attention heads"),
    "K": Split(
        "the number of key/value heads",
        _evenly_or_repeated,
        "neither divides over {ranks} ranks nor can it be repeated evenly on them",
    ),
    "Kl": Split("the number of key heads of the linear attention"),
    "Vl": Split("the number of value heads of the linear attention"),
    "h": Split("the number of heads of the recurrence"),
    "G": Split(
        "the number of groups of the recurrence",
        _evenly_or_one,
        "does not divide over {ranks} ranks, and only a single group is repeated",
    ),
    "d": Split("the inner width of the recurrence"),
    "I": Split("the inner width of the MLP"),
    "Im": Split("the inner width of the experts"),
    "Is": Split("the inner width of the shared expert"),
    "V": Split(
        "the vocabulary",
        _evenly_padded,
        f"padded to a multiple of {VOCABULARY_STEP}, does not divide over {{ranks}} ranks",
    ),
}
"""By the letters that the shapes of a layout are written in (`sparkquant.sizes`)."""

ALWAYS = frozenset({"A"})
"""What the engine asks of config.json before it knows the model."""


def letters_of(rules: Iterable[TensorRule]) -> frozenset[str]:
    """The letters in the shapes of the tensors that a checkpoint holds, and those that are asked of every model."""
    shapes = {rule.shape for rule in rules if rule.layer_class not in _REPLICATED}
    parts = {part.strip() for shape in shapes for axis in shape.split(",") for part in axis.split("|")}
    return ALWAYS.union(factor for part in parts for term in part.split("+") for factor in term.split("*"))


@dataclass(frozen=True, slots=True)
class Shared:
    """What ranks share of one model: `sizes` as config.json states them, and the `letters` of them that it has."""

    sizes: Mapping[str, tuple[str, Any]]
    letters: Collection[str]

    def faults(self, ranks: int) -> Iterator[str]:
        """Why the engine cannot split the model over so many ranks; nothing when it can."""
        for letter, split in SPLITS.items():
            if letter not in self.letters or letter not in self.sizes:
                continue
            key, stated = self.sizes[letter]
            counts = sorted({count for count in (stated if isinstance(stated, list) else [stated]) if count > 0})
            wrong = next((count for count in counts if not split.fits(count, ranks)), None)
            if wrong is not None:
                yield f"{split.what}, {wrong} ({key}), {split.fault.format(ranks=ranks)}"

    @property
    def fitting(self) -> str:
        """The usual sizes that fit, in words."""
        fit = [str(ranks) for ranks in USUAL_SIZES if not any(self.faults(ranks))]
        return f"of {', '.join(map(str, USUAL_SIZES))} these fit: {', '.join(fit)}"

    def unsplittable(self, tp: Iterable[int]) -> dict[int, str]:
        """The sizes that cannot be had, each with the first reason."""
        found = {size: next(self.faults(size), "") for size in tp}
        return {size: reason for size, reason in found.items() if reason}
