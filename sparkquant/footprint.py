"""What a plan costs: memory and disk to make it, bytes per decoded token to serve it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sparkquant.layers import LayerClass, Layout
from sparkquant.recipe import Recipe
from sparkquant.schemes import OutputTensor

if TYPE_CHECKING:
    from sparkquant.decisions import Decision

BANDWIDTH_GBPS = {"12.1": 273.0}
"""Memory bandwidth in 1e9 bytes per second by compute capability, where one chip has it (GB10: LPDDR5X, 273 GB/s)."""

NOT_READ_PER_TOKEN = frozenset({LayerClass.EMBED, LayerClass.VISION, LayerClass.AUDIO, LayerClass.MTP})
"""An embedding lookup reads one row, the towers run once per image, the draft head only with speculation."""

NOT_IN_THE_MODEL = frozenset({LayerClass.VISION, LayerClass.AUDIO, LayerClass.MTP})
"""What the text-only class of a family leaves out."""

MARGIN_BYTES = 64 * 2**20
"""Disk that stays free beside the result: its index, records and side files."""
CHUNK_BYTES = 256 * 2**20
"""A fused 3-D expert tensor is read in slices of whole experts up to this size."""

BASE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Footprint:
    """Costs of a plan in bytes.

    working_bytes         memory that quantizing needs above the imports: three times the largest unit, and a base; with
                          another quantizer also the whole language model
    disk_bytes            free space that the result needs, index and side files excluded
    decode_bytes          weights read for one decoded token (routed experts by their active share, KV cache excluded)
    decode_ceiling_tps    bandwidth / decode_bytes: no decoder without speculation is faster; None for an unknown chip
    """

    working_bytes: int
    disk_bytes: int
    decode_bytes: int
    bandwidth_gbps: float | None
    decode_ceiling_tps: float | None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def footprint(decisions: Iterable[Decision], layout: Layout, recipe: Recipe) -> Footprint:
    """Add up a plan's costs."""
    decisions = list(decisions)
    total, active = layout.experts
    share = active / total if total else 1.0
    decode = 0.0
    for d in decisions:
        routed = d.layer_class in (LayerClass.EXPERTS_GATE_UP, LayerClass.EXPERTS_DOWN)
        if d.layer_class not in NOT_READ_PER_TOKEN:
            decode += d.output_bytes * (share if routed else 1.0)
        elif d.layer_class is LayerClass.EMBED and layout.tied_head:
            decode += d.output_bytes
    bandwidth = BANDWIDTH_GBPS.get(recipe.target.capability)
    working = 3 * _largest_unit(decisions) + BASE_BYTES
    if recipe.method.delegated:  # another quantizer holds the whole language model, and works on copies of a block
        working += sum(source_size(d) for d in decisions if d.layer_class not in NOT_IN_THE_MODEL)
    return Footprint(
        working_bytes=working,
        disk_bytes=sum(d.output_bytes for d in decisions),
        decode_bytes=round(decode),
        bandwidth_gbps=bandwidth,
        decode_ceiling_tps=round(bandwidth * 1e9 / decode, 1) if bandwidth and decode else None,
    )


def source_size(decision: Decision) -> int:
    """Payload of a decision's source tensor in bytes."""
    return OutputTensor("", decision.dtype, decision.shape).bytes


def _largest_unit(decisions: Iterable[Decision]) -> int:
    """Source bytes that must be in memory together; kept tensors are copied in small pieces and do not count."""
    units: dict[str, int] = defaultdict(int)
    for d in decisions:
        if d.scheme is not None:
            size = source_size(d)
            one_expert = size // d.experts
            units[d.scale_group] += max(one_expert, min(size, CHUNK_BYTES)) if d.parts else size
    return max(units.values(), default=0)
