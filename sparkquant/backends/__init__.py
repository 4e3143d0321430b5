"""Who computes the stored tensors. A backend gets units of the plan with their weights, and knows no files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sparkquant.decisions import Decision

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Unit:
    """Source tensors that must be in memory together: they share a scale, or are one slice of a fused expert tensor.

    first, last   the experts of a fused 3-D tensor that this unit covers; (0, 1) for matrices
    """

    decisions: tuple[Decision, ...]
    first: int = 0
    last: int = 1

    @property
    def name(self) -> str:
        """The scale group, and the expert range where it is one."""
        decision = self.decisions[0]
        span = f"[{self.first}:{self.last}]" if decision.parts else ""
        return f"{decision.scale_group}{span}"


class Backend(Protocol):
    """Computes what a unit stores."""

    def reads(self, unit: Unit) -> bool:
        """Whether `quantize` needs the unit's weights; when it does not, it is given none."""
        ...

    def quantize(self, unit: Unit, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (stored name, tensor in its stored dtype and shape) for every output of the unit's decisions.

        `weights` holds each decision's tensor: [N, K], or [last - first, N, K] for a slice of fused experts.
        """
        ...
