"""`recipes lint` of a model repository: its recipe, and a dry plan against its own config.json and index.

A checkout for CI holds no weights: shards are absent, or pointers to large files. Names then come from the index and
shapes from config.json, by the formulas of the family's layout; with the shards at hand, from their headers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkquant.checkpoint import INDEX, Checkpoint, TensorHeader, read_json
from sparkquant.errors import CheckpointError, PlanError, Problem, RecipeError, UnknownTensor
from sparkquant.layers import Layout, Placement, classify
from sparkquant.layouts import layout_for
from sparkquant.planning import make_plan
from sparkquant.positions import Document
from sparkquant.recipe import Recipe
from sparkquant.repository_recipe import NAMES, recipe_path, repository_recipe
from sparkquant.requantizing import as_16_bit

POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class Linted:
    """Faults with their places, and what could not be looked at."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()


def is_repository(folder: Path) -> bool:
    """Whether a folder holds a model rather than recipes alone."""
    return (folder / "config.json").exists()


def lint_repository(folder: Path, *, shown: str = "", recipe: Path | None = None) -> Linted:
    """Every fault of a repository's recipe, alone and against the model beside it.

    shown   how places begin: the path of the folder as the caller named it
    recipe  the file, where the caller named one of several
    """
    prefix = f"{shown.rstrip('/')}/" if shown not in ("", ".") else ""
    path = recipe or recipe_path(folder)
    if path is None:
        return Linted((Problem(shown or ".", f"no {' and no '.join(NAMES)} of sparkquant here"),))
    name = f"{prefix}{path.name}"
    try:
        found = repository_recipe(path, shown=name)
    except RecipeError as error:
        return Linted(error.problems or (Problem(f"{name}:1:1", error.what, error.hint),))
    except CheckpointError as error:
        return Linted((Problem(f"{name}:1:1", error.what, error.hint),))
    document = Document(path.read_text(encoding="utf-8"), name)
    try:
        checkpoint, notes = described(folder)
        make_plan(checkpoint, found)
    except PlanError as error:
        return Linted(tuple(_placed(error.problems, document, found, checkpoint)), tuple(notes))
    except CheckpointError as error:
        problems = error.problems or (Problem("", error.what, error.hint),)
        return Linted(tuple(Problem(f"{prefix}config.json:1:1", *_told(problem)) for problem in problems))
    return Linted((), tuple(notes))


def _told(problem: Problem) -> tuple[str, str]:
    return (f"{problem.where}: " if problem.where else "") + problem.what, problem.hint


def described(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The checkpoint of a repository from whatever of it is here, and notes on what is not.

    Raises CheckpointError when there is neither an index nor a shard, or config and index cannot be read.
    """
    config = read_json(folder / "config.json")
    weight_map = read_json(folder / INDEX).get("weight_map") if (folder / INDEX).is_file() else None
    names = set(weight_map.values()) if isinstance(weight_map, dict) else {p.name for p in folder.glob("*.safetensors")}
    shards = [folder / name for name in sorted(map(str, names)) if Path(str(name)).name == name]
    if shards and all(path.is_file() and not _is_pointer(path) for path in shards):
        return Checkpoint.open(folder), []
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"no {INDEX}, and no weights here: nothing says which tensors there are",
            hint="commit the index (a single shard needs none when it is fetched: `git lfs pull`)",
        )
    checkpoint, unknown = _from_index(folder, config, {str(k): str(v) for k, v in weight_map.items()})
    note = "the weights are not here: names are those of the index, shapes those of config.json"
    return checkpoint, [note + (f"; {unknown} matrices have a shape that it does not give" if unknown else "")]


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def _from_index(folder: Path, config: dict[str, Any], weight_map: Mapping[str, str]) -> tuple[Checkpoint, int]:
    layout = layout_for(config, source=str(folder / "config.json"))
    placements = classify(layout, weight_map, source=INDEX)
    shards: dict[str, dict[str, TensorHeader]] = defaultdict(dict)
    unknown = 0
    for name, placement in placements.items():
        shape = shape_by_config(layout, placement)
        if shape is None:
            unknown += placement.rule.linear
            shape = (128, 128) if placement.rule.linear else (1,)
        size = 2 * math.prod(shape)
        shards[weight_map[name]][name] = TensorHeader(name, "BF16", shape, weight_map[name], 0, size)
    tensors = {name: header for shard in shards.values() for name, header in shard.items()}
    return as_16_bit(Checkpoint(folder, config, dict(sorted(tensors.items())), dict(shards), ())), unknown


def shape_by_config(layout: Layout, placement: Placement) -> tuple[int, ...] | None:
    """What config.json says of a tensor's shape, by the layout's formula (`2*A*D|A*D, H`); None where it says nothing.

    Of alternatives the first one that can be worked out is taken.
    """
    formula = placement.rule.shape
    if not formula:
        return None
    axes = [_size(axis, layout.sizes, placement.layer) for axis in formula.split(",")]
    return None if None in axes else tuple(size for size in axes if size is not None)


def _size(axis: str, sizes: Mapping[str, tuple[str, Any]], layer: int | None) -> int | None:
    for term in axis.strip().split("|"):
        products = [_product(product.split("*"), sizes, layer) for product in term.split("+")]
        if None not in products:
            return sum(product for product in products if product is not None)
    return None


def _product(factors: Sequence[str], sizes: Mapping[str, tuple[str, Any]], layer: int | None) -> int | None:
    value = 1
    for factor in factors:
        known = int(factor) if factor.isdecimal() else sizes.get(factor, ("", None))[1]
        if isinstance(known, list):
            known = known[layer] if layer is not None and layer < len(known) else None
        if type(known) is not int:
            return None
        value *= known
    return value


def _placed(
    problems: Sequence[Problem], document: Document, recipe: Recipe, checkpoint: Checkpoint
) -> Iterator[Problem]:
    """Faults of a plan at the line of the recipe that they come from; equal ones of many tensors are one."""
    try:
        placements = classify(layout_for(checkpoint.config), checkpoint.tensors)
    except (CheckpointError, UnknownTensor):
        placements = {}
    classes = {name: str(placement.layer_class) for name, placement in placements.items()}
    classes |= {placement.group: str(placement.layer_class) for placement in placements.values() if placement.group}
    classes |= {name: name for name in map(str, recipe.schemes)}
    merged: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for problem in problems:
        if problem.where == recipe.name and problem.what.startswith("override"):
            where = document.place(("overrides",), key=True)
        elif problem.where == recipe.name:
            where = document.place(("families",), key=True)
        elif problem.where in classes:
            where = document.place(("schemes", classes[problem.where]), key=True)
        else:
            where = document.place(())
        merged[where, problem.what, problem.hint].append(problem.where)
    for (where, what, hint), names in merged.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Problem(where, f"{names[0]}{more}: {what}", hint)
