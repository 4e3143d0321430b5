"""What differs between two recipes, two plans or two checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkquant.changes import (
    ClassChange,
    Held,
    QualityChange,
    bytes_of,
    class_changes,
    held_by_contents,
    held_by_plan,
    held_by_recipes,
    quality_change,
)
from sparkquant.checkpoint import Checkpoint, read_json
from sparkquant.contents import contents_of
from sparkquant.decisions import PLAN_FORMAT
from sparkquant.errors import CheckpointError, UnsupportedFormat, UsageError
from sparkquant.events import Advanced, Finished, Listener, Started, ignore
from sparkquant.planning import plan
from sparkquant.recipe_files import load_recipe, recipe_names
from sparkquant.verification.subject import Subject

PIECE = 2**20
"""Bytes read at once; one buffer of that size is all that comparing weights needs."""


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
    """All changes from `a` to `b`; `kind` says what was compared, `compared` how far: what equality here means.

    classes  every layer class on either side; empty where a checkpoint is of an unknown family or format
    bytes    of all tensors, before and after; None where a side has none (a recipe without a source)
    quality  what `evaluate` recorded in two checkpoints; None where nothing is recorded
    """

    kind: str
    a: str
    b: str
    changes: tuple[Change, ...]
    compared: str = ""
    classes: tuple[ClassChange, ...] = ()
    bytes: tuple[int | None, int | None] = (None, None)
    quality: QualityChange | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "kind": self.kind,
            "a": self.a,
            "b": self.b,
            "compared": self.compared,
            "bytes": {"before": self.bytes[0], "after": self.bytes[1]},
            "classes": [change.as_json() for change in self.classes],
            "quality": None if self.quality is None else self.quality.as_json(),
            "changes": [change.as_json() for change in self.changes],
        }

    def to_json(self) -> str:
        """Stable text."""
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n"


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    headers: bool = False,
    source: str | os.PathLike[str] | None = None,
    listener: Listener = ignore,
) -> Difference:
    """Compare two checkpoint folders, two plan files (`plan --json`) or two recipes (name or YAML file).

    Checkpoints are compared by names, dtypes, shapes, configs and the bytes of every tensor and side file; with
    `headers` no weight and no side file is read, nor is quality, whose records are bound to the bytes. How tensors are
    spread over files is not compared. With `source`, a checkpoint to plan for, recipes are compared by their plans too.
    Raises UsageError for unlike kinds and for JSON files that are no plans.
    """
    kind, other = _kind(a), _kind(b)
    if kind != other:
        raise UsageError(f"{a} is a {kind}, {b} is a {other}", hint="compare two checkpoints, two plans or two recipes")
    if headers and kind != "checkpoint":
        raise UsageError(f"headers are of checkpoints, {a} is a {kind}", hint="leave --headers out")
    if source is not None and kind != "recipe":
        raise UsageError(f"a source is for recipes, {a} is a {kind}", hint="leave --source out")
    if kind == "checkpoint":
        return _checkpoints(a, b, headers, listener)
    if kind == "plan":
        before, after = read_plan(Path(a)), read_plan(Path(b))
        return _by_class(
            kind, a, b, _plans(before, after), "everything in the plans", [_planned(before), _planned(after)]
        )
    recipes = load_recipe(a), load_recipe(b)
    found, compared = _changes(*(_recipe(recipe.as_json()) for recipe in recipes)), "all keys"
    if source is None:
        held = held_by_recipes(*recipes)
        return _by_class(kind, a, b, found, compared, held)
    plans = [_planned(plan(source, recipe).as_json()) for recipe in recipes]
    return _by_class(kind, a, b, found, f"{compared}, and what they make of {source}", plans)


_HeldBy = Mapping[str, Sequence[Held]]


def _by_class(
    kind: str, a: Any, b: Any, changes: Sequence[Change], compared: str, held: Sequence[_HeldBy],
    quality: QualityChange | None = None,
) -> Difference:  # fmt: skip
    before, after = held
    sizes = bytes_of(before), bytes_of(after)
    return Difference(kind, str(a), str(b), tuple(changes), compared, class_changes(before, after), sizes, quality)


def _planned(plan: Mapping[str, Any]) -> dict[str, tuple[Held, ...]]:
    return held_by_plan(plan["classes"])


def _kind(item: str | os.PathLike[str]) -> str:
    path = Path(item)
    if path.is_dir():
        return "checkpoint"
    if path.suffix in (".yaml", ".yml") or str(item) in recipe_names():
        return "recipe"
    if path.is_file():
        return "plan"
    raise UsageError(
        f"{item} is no checkpoint folder, plan file or recipe",
        hint="pass folders, files written by `plan --json`, or recipe names",
    )


_TABLE = {"engine", "capability", "tp", "class", "scheme", "size", "kernel", "count"}
"""Keys of a row of `kernels` that are compared."""


def read_plan(path: Path) -> dict[str, Any]:
    """The JSON of a plan file; UsageError where the file is something else or not whole."""
    hint = "pass a file written by `plan --out`"
    try:
        fields = read_json(path)
    except CheckpointError as error:
        raise UsageError(f"{error.what.removesuffix('.')}; no plan", hint=hint) from None
    if not {"format", "decisions"} <= fields.keys():
        raise UsageError(f"{path} is JSON, but no plan: `format` and `decisions` are missing", hint=hint)
    if fields["format"] != PLAN_FORMAT:
        raise UsageError(f"{path}: plan format {fields['format']!r} is not {PLAN_FORMAT!r}", hint="write it again")
    for key, name in (("decisions", "tensor"), ("shards", "name"), ("classes", "class")):
        rows = fields.get(key)
        if not isinstance(rows, list) or not all(isinstance(r, dict) and isinstance(r.get(name), str) for r in rows):
            raise UsageError(f"{path}: a damaged plan: `{key}` is no list of maps with `{name}`", hint=hint)
    kernels = fields.get("kernels", [])
    if not isinstance(kernels, list) or not all(isinstance(row, dict) and row.keys() >= _TABLE for row in kernels):
        raise UsageError(f"{path}: a damaged plan: `kernels` is no table", hint=hint)
    for key in ("source", "recipe", "totals", "footprint"):
        if not isinstance(fields.get(key), dict):
            raise UsageError(f"{path}: a damaged plan: `{key}` is no map", hint=hint)
    for key in ("notes", "engines"):
        if not isinstance(fields.get(key), list) or not all(isinstance(value, str) for value in fields[key]):
            raise UsageError(f"{path}: a damaged plan: `{key}` is no list of texts", hint=hint)
    return fields


def _flat(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{path}.{key}" if path else key).items()}
    return {path: value}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    names = [*before, *(name for name in after if name not in before)]
    return [
        Change(name, before.get(name), after.get(name))
        for name in names
        if name not in before or name not in after or before[name] != after[name]
    ]


def _recipe(fields: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in fields.items() if key != "schemes"}
    schemes = fields.get("schemes")
    named = {f"schemes.{name}": scheme for name, scheme in schemes.items()} if isinstance(schemes, Mapping) else {}
    return {**_flat(rest, ""), **named}


def _plans(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    found = _changes(_summary(before), _summary(after))
    notes = before["notes"], after["notes"]
    found += [Change("note", note, None) for note in notes[0] if note not in notes[1]]
    found += [Change("note", None, note) for note in notes[1] if note not in notes[0]]
    old, new = ({row["tensor"]: row for row in plan["decisions"]} for plan in (before, after))
    for name in [*old, *(name for name in new if name not in old)]:
        ours, theirs = old.get(name, {}), new.get(name, {})
        if ours.get("scheme") != theirs.get("scheme") or not (ours and theirs):
            found.append(Change(name, ours.get("scheme"), theirs.get("scheme")))
        else:
            found += [
                Change(f"{name} ({change.what})", change.before, change.after) for change in _changes(ours, theirs)
            ]
    if "kernels" in before and "kernels" in after:  # the plan inside a result has none
        found += _changes(_kernels(before["kernels"]), _kernels(after["kernels"]))
    else:
        before, after = ({key: value for key, value in plan.items() if key != "kernels"} for plan in (before, after))
    if not found and before != after:
        found.append(Change("order or unknown keys", _digest_of(before), _digest_of(after)))
    return found


def _kernels(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Where the modules of a class and size run, by engine, capability and ranks."""
    found: dict[str, list[str]] = {}
    for row in rows:
        at = f"vLLM {row['engine']}, {row['capability']}, tp {row['tp']}"
        label = f"kernel of {row['class']} {row['scheme']} {row['size']} ({at})"
        found.setdefault(label, []).append(f"{row['kernel']} {row['count']}")
    return {label: ", ".join(kernels) for label, kernels in found.items()}


def _summary(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan says above its decisions."""
    described = _flat(plan["source"], "source")
    described |= {f"recipe.{key}": value for key, value in _recipe(plan["recipe"]).items()}
    described |= _flat(plan["totals"], "totals") | _flat(plan["footprint"], "footprint")
    described["engines"] = plan["engines"]
    for row in plan["classes"]:
        label = f"class {row['class']} as {row.get('scheme')}"
        described[label] = f"{row.get('tensors')} tensors, {row.get('output_bytes')} bytes"
    for shard in plan["shards"]:
        tensors = shard.get("tensors")
        count = len(tensors) if isinstance(tensors, list) else 0
        described[f"shard {shard['name']}"] = f"{shard.get('bytes')} bytes, {count} tensors, {_digest_of(tensors)}"
    return described


def _digest_of(value: Any) -> str:
    return f"sha256 {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]}"


def _checkpoints(a: str | os.PathLike[str], b: str | os.PathLike[str], headers: bool, listener: Listener) -> Difference:
    sides = Checkpoint.open(a, strict=False), Checkpoint.open(b, strict=False)
    found = _changes(*(_headers(side) for side in sides))
    compared, quality = "headers and configs only: no weight was read", None
    if not headers:
        found += _bytes(*sides, listener)
        compared = "headers, configs, and the bytes of every tensor and side file"
        quality = quality_change(sides[0].path, sides[1].path, listener=listener)
    held = [_held(side) for side in sides]
    return _by_class("checkpoint", a, b, found, compared, held if all(held) else ({}, {}), quality)


def _held(side: Checkpoint) -> dict[str, tuple[Held, ...]]:
    """Classes of a checkpoint; nothing for one whose quantization nobody reads."""
    try:
        return held_by_contents(contents_of(Subject(side, None)))
    except UnsupportedFormat:
        return {}


def _bytes(before: Checkpoint, after: Checkpoint, listener: Listener) -> list[Change]:
    """Tensors of one dtype and shape whose bytes differ, and side files."""
    found = []
    pairs = [(h, after.tensors[n]) for n, h in before.tensors.items() if n in after.tensors]
    pairs = [(h, t) for h, t in pairs if (h.dtype, h.shape) == (t.dtype, t.shape)]
    files = {h.name: (before.path / h.shard, after.path / t.shard) for h, t in pairs}
    pairs = [(h, t) for h, t in pairs if h.start != t.start or not files[h.name][0].samefile(files[h.name][1])]
    if pairs:
        listener(Started("compare", 2 * sum(header.bytes for header, _ in pairs)))
    for ours, theirs in pairs:
        old, new = files[ours.name]
        digests = _digest(old, ours.start, ours.bytes), _digest(new, theirs.start, theirs.bytes)
        if digests[0] != digests[1]:
            label = f"{ours.dtype} {list(ours.shape)}, bytes xxh3"
            found.append(Change(ours.name, f"{label} {digests[0]}", f"{label} {digests[1]}"))
        listener(Advanced("compare", 2 * ours.bytes, ours.name))
    if pairs:
        listener(Finished("compare"))
    for name in sorted({*before.side_files()} & {*after.side_files()} - {"config.json"}):
        digests = (_digest(before.path / name), _digest(after.path / name))
        if digests[0] != digests[1]:
            found.append(Change(name, f"bytes xxh3 {digests[0]}", f"bytes xxh3 {digests[1]}"))
    return found


def _headers(checkpoint: Checkpoint) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tensors": len(checkpoint.tensors),
        "bytes": sum(header.bytes for header in checkpoint.tensors.values()),
        "side files": checkpoint.side_files(),
    }
    described |= _flat(checkpoint.config, "config")
    for name, header in checkpoint.tensors.items():
        described[name] = f"{header.dtype} {list(header.shape)}"
    return described


def _digest(path: Path, start: int = 0, count: int | None = None) -> str:
    """xxh3-128 of a part of a file, in pieces."""
    import xxhash

    hasher = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while count is None or count > 0:
                piece = file.read(PIECE if count is None else min(PIECE, count))
                if not piece and count:
                    raise CheckpointError(f"{path}: ends early", hint="fetch it again")
                if not piece:
                    break
                hasher.update(piece)
                count = None if count is None else count - len(piece)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}", hint="check the file") from None
    return hasher.hexdigest()
