"""What differs between two recipes, two plans or two checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkquant.checkpoint import Checkpoint, read_json
from sparkquant.errors import UsageError
from sparkquant.recipe_files import load_recipe, recipe_names


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: what it is about, and the value on either side (None where one side lacks it)."""

    what: str
    before: Any
    after: Any

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"what": self.what, "before": self.before, "after": self.after}


@dataclass(frozen=True)
class Difference:
    """All changes from `a` to `b`; `kind` says what was compared."""

    kind: str
    a: str
    b: str
    changes: tuple[Change, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"kind": self.kind, "a": self.a, "b": self.b, "changes": [change.as_json() for change in self.changes]}

    def to_json(self) -> str:
        """Stable text."""
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n"


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Difference:
    """Compare two checkpoint folders, two plan files (`plan --json`) or two recipes (name or YAML file).

    Checkpoints are compared by headers and configs: names, dtypes, shapes, bytes. Raises UsageError for unlike kinds.
    """
    kinds = _kind(a), _kind(b)
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"{a} is a {kinds[0]}, {b} is a {kinds[1]}", hint="compare two checkpoints, two plans or two recipes"
        )
    described = {"checkpoint": _checkpoint, "plan": _plan, "recipe": _recipe}[kinds[0]]
    before, after = described(a), described(b)
    names = [*before, *(name for name in after if name not in before)]
    changes = tuple(
        Change(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)
    )
    return Difference(kinds[0], str(a), str(b), changes)


def _kind(item: str | os.PathLike[str]) -> str:
    path = Path(item)
    if path.is_dir():
        return "checkpoint"
    if path.suffix == ".json" and path.is_file():
        return "plan"
    if path.suffix in (".yaml", ".yml") or str(item) in recipe_names():
        return "recipe"
    raise UsageError(
        f"{item} is no checkpoint folder, plan file or recipe",
        hint="pass folders, files written by `plan --json`, or recipe names",
    )


def _flat(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{path}.{key}" if path else key).items()}
    return {path: value}


def _recipe(item: str | os.PathLike[str]) -> dict[str, Any]:
    fields = load_recipe(item).as_json()
    schemes = fields.pop("schemes")
    return {**_flat(fields, ""), **{f"schemes.{name}": scheme for name, scheme in schemes.items()}}


def _plan(item: str | os.PathLike[str]) -> dict[str, Any]:
    fields = read_json(Path(item))
    described = _flat(fields.get("totals"), "totals") | _flat(fields.get("footprint"), "footprint")
    for row in fields.get("classes", []):
        label = f"class {row.get('class')} as {row.get('scheme')}"
        described[label] = f"{row.get('tensors')} tensors, {row.get('output_bytes')} bytes"
    for decision in fields.get("decisions", []):
        described[str(decision.get("tensor"))] = decision.get("scheme")
    return described


def _checkpoint(item: str | os.PathLike[str]) -> dict[str, Any]:
    checkpoint = Checkpoint.open(item, strict=False)
    described: dict[str, Any] = {
        "tensors": len(checkpoint.tensors),
        "bytes": sum(header.bytes for header in checkpoint.tensors.values()),
        "side files": checkpoint.side_files(),
    }
    described |= _flat(checkpoint.config, "config")
    for name, header in checkpoint.tensors.items():
        described[name] = f"{header.dtype} {list(header.shape)}"
    return described
