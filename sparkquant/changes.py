"""What changed from one side to the other, added up: by layer class, in bytes, and in measured quality."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkquant.contents import Contents
from sparkquant.events import Listener, ignore
from sparkquant.evidence import FOLDER, Freshness, read
from sparkquant.layers import LayerClass
from sparkquant.measured import Quality, parsed
from sparkquant.recipe import Recipe
from sparkquant.rowwise import Paired, paired_rows
from sparkquant.schemes import KEEP

VERB = "evaluate"
_ORDER = {str(layer_class): place for place, layer_class in enumerate(LayerClass)}


@dataclass(frozen=True)
class Held:
    """A part of a class: scheme, modules (in a plan: tensors), bytes. A recipe alone has schemes only."""

    scheme: str
    count: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class ClassChange:
    """One layer class on either side."""

    layer_class: str
    before: tuple[Held, ...]
    after: tuple[Held, ...]

    @property
    def changed(self) -> bool:
        """One side stores the class otherwise than the other, or not at all."""
        return self.before != self.after

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        sides = {"before": [asdict(held) for held in self.before], "after": [asdict(held) for held in self.after]}
        return {"class": self.layer_class, **sides, "changed": self.changed}


@dataclass(frozen=True)
class QualityChange:
    """Measured quality of two results, (before, after) by name; None for what a side lacks.

    paired  difference in KL row by row; None where the rows were others
    why     why something could not be compared; empty when all could
    """

    numbers: Mapping[str, tuple[float | None, float | None]]
    paired: Paired | None = None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        numbers = {name: {"before": pair[0], "after": pair[1]} for name, pair in self.numbers.items()}
        return {"numbers": numbers, "paired": None if self.paired is None else asdict(self.paired), "why": self.why}


def class_changes(before: Mapping[str, Sequence[Held]], after: Mapping[str, Sequence[Held]]) -> tuple[ClassChange, ...]:
    """Every class of either side, in the order in which a token meets them."""
    names = sorted({*before, *after}, key=lambda name: (_ORDER.get(name, len(_ORDER)), name))
    return tuple(ClassChange(name, tuple(before.get(name, ())), tuple(after.get(name, ()))) for name in names)


def held_by_recipes(*recipes: Recipe) -> list[dict[str, tuple[Held, ...]]]:
    """Schemes of all classes that any of the recipes names; what one does not name, it keeps."""
    labels = [
        {str(c): KEEP if scheme is None else scheme.label for c, scheme in recipe.schemes.items()}
        | {str(c): permission.scheme.label for c, permission in recipe.unprotect.items()}
        for recipe in recipes
    ]
    names = list(dict.fromkeys(name for named in labels for name in named))
    return [{name: (Held(named.get(name, KEEP)),) for name in names} for named in labels]


def held_by_plan(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Held, ...]]:
    """The class table of a plan; a damaged plan may lack numbers."""
    found: dict[str, list[Held]] = {}
    for row in rows:
        held = Held(str(row.get("scheme")), _number(row.get("tensors")), _number(row.get("output_bytes")))
        found.setdefault(str(row["class"]), []).append(held)
    return {name: tuple(parts) for name, parts in found.items()}


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


def held_by_contents(contents: Contents) -> dict[str, tuple[Held, ...]]:
    """What a checkpoint stores."""
    found: dict[str, list[Held]] = {}
    for row in contents.rows:
        found.setdefault(row.layer_class, []).append(Held(row.scheme, row.modules, row.bytes))
    return {name: tuple(parts) for name, parts in found.items()}


def bytes_of(held: Mapping[str, Sequence[Held]]) -> int | None:
    """All bytes; None where one part has none."""
    sizes = [part.bytes for parts in held.values() for part in parts]
    return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)


def quality_change(a: Path, b: Path, *, listener: Listener = ignore) -> QualityChange | None:
    """What `evaluate` recorded in two checkpoints; None where neither has a record."""
    if not any((side / FOLDER / f"{VERB}.json").is_file() for side in (a, b)):
        return None
    (before, why_a), (after, why_b) = _quality(a, listener), _quality(b, listener)
    numbers = {
        name: (None if before is None else get(before), None if after is None else get(after))
        for name, get in _NUMBERS.items()
    }
    why = "; ".join(f"{side.name}: {reason}" for side, reason in ((a, why_a), (b, why_b)) if reason)
    if before is None or after is None:
        return QualityChange(numbers, None, why)
    if before.data != after.data:
        return QualityChange(numbers, None, "they were measured on different rows: compare nothing but orders of size")
    if len(before.kl_rows) != len(after.kl_rows) or len(before.kl_rows) < 2:
        return QualityChange(numbers, None, "too few rows for a difference row by row")
    return QualityChange(numbers, paired_rows(before.kl_rows, after.kl_rows))


_NUMBERS: Mapping[str, Callable[[Quality], float | None]] = {
    "kl_mean": lambda quality: quality.kl_mean,
    "kl_p99": lambda quality: quality.kl_p99,
    "top1": lambda quality: quality.top1,
    "nll": lambda quality: quality.nll.get("result"),
    "exact_recall": lambda quality: quality.recall.get("result"),
    "first_draft": lambda quality: quality.first_position("result"),
}


def _quality(folder: Path, listener: Listener) -> tuple[Quality | None, str]:
    """(quality, "") or (None, why not)."""
    found = read(folder, listener=listener).get(VERB)
    if found is None:
        return None, "not evaluated"
    if found.freshness is not Freshness.FRESH:
        return None, f"its record is {found.freshness}: {found.why}"
    return parsed(Quality, found.result)
