"""What a checkpoint holds, by layer class, layer and scheme: read from the headers of any producer's folder."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkquant.formats import stored_modules
from sparkquant.formats.stored import StoredModule
from sparkquant.layers import LayerClass
from sparkquant.verification.subject import Subject

KEPT = "16-bit"
"""The label of weights that are stored plainly, whatever float they are in."""

OUTSIDE = "outside"
"""The row of the scheme map for what belongs to no decoder layer."""

_APART = frozenset({LayerClass.MTP, LayerClass.VISION, LayerClass.AUDIO})
_ORDER = {str(layer_class): place for place, layer_class in enumerate(LayerClass)}


@dataclass(frozen=True)
class ClassBytes:
    """One layer class in one scheme. `plain_bytes` is what the same weights take at 16 bits."""

    layer_class: str
    scheme: str
    modules: int
    parameters: int
    bytes: int
    plain_bytes: int


@dataclass(frozen=True)
class Contents:
    """Bytes by class and scheme, largest class first, and which schemes each layer has in each class.

    layers   row label ("0", "1" ... or `outside`) -> class -> labels of the schemes found there
    unknown  names that the family's layout does not know; their bytes are counted under `unknown`
    """

    rows: tuple[ClassBytes, ...]
    layers: Mapping[str, Mapping[str, tuple[str, ...]]]
    unknown: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Payload of all tensors."""
        return sum(row.bytes for row in self.rows)

    @property
    def parameters(self) -> int:
        """Weights that the tensors stand for."""
        return sum(row.parameters for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, kept parts and scales included."""
        return 8 * self.bytes / max(1, self.parameters)

    @property
    def schemes(self) -> tuple[str, ...]:
        """Labels that occur, most bytes first."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[row.scheme] += row.bytes
        return tuple(label for label, _ in sorted(totals.items(), key=lambda pair: (-pair[1], pair[0])))

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes that occur, in the order in which a token meets them."""
        return tuple(sorted({row.layer_class for row in self.rows}, key=lambda name: (_ORDER.get(name, 99), name)))

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "bytes": self.bytes,
            "parameters": self.parameters,
            "bits_per_weight": round(self.bits_per_weight, 3),
            "classes": [{"class": row.layer_class, **_numbers(row)} for row in self.rows],
            "layers": {row: {name: list(found[name]) for name in found} for row, found in self.layers.items()},
            "unknown": list(self.unknown),
        }


def _numbers(row: ClassBytes) -> dict[str, Any]:
    return {
        "scheme": row.scheme, "modules": row.modules, "parameters": row.parameters,
        "bytes": row.bytes, "plain_bytes": row.plain_bytes,
    }  # fmt: skip


def contents_of(subject: Subject) -> Contents:
    """Add up a folder. Raises UnsupportedFormat when its quantization is of a kind that no reader knows."""
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    found: dict[tuple[int, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    unknown = []
    for name, module in stored_modules(subject.checkpoint).items():
        placement = subject.place(name)
        layer_class = "unknown" if placement is None else str(placement.layer_class)
        if placement is None:
            unknown.append(name)
        label = KEPT if module.scheme is None else module.scheme.label
        total = totals[layer_class, label]
        for place, amount in enumerate((1, _parameters(module), sum(t.bytes for t in module.tensors.values()))):
            total[place] += amount
        layer = None if placement is None or placement.layer_class in _APART else placement.layer
        found[(-1, OUTSIDE) if layer is None else (layer, str(layer))][layer_class].add(label)
    rows = [ClassBytes(*key, modules, count, size, 2 * count) for key, (modules, count, size) in totals.items()]
    weight = Counter[str]()
    for row in rows:
        weight[row.layer_class] += row.bytes
    rows.sort(key=lambda row: (-weight[row.layer_class], row.layer_class, -row.bytes, row.scheme))
    layers = {key[1]: {name: tuple(sorted(labels)) for name, labels in found[key].items()} for key in sorted(found)}
    return Contents(tuple(rows), layers, tuple(unknown))


def _parameters(module: StoredModule) -> int:
    if module.shape is not None:
        return math.prod(module.shape)
    return max((tensor.parameters for tensor in module.tensors.values()), default=0)
