"""Recipes as files: the shipped ones by name, others by path, `extends` resolved one level deep."""

from __future__ import annotations

import difflib
import importlib.resources
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkquant import layouts
from sparkquant.errors import Problem, RecipeError
from sparkquant.positions import Document
from sparkquant.recipe import HINT, Recipe, parse_recipe

MAX_RECIPE_BYTES = 100_000


def recipe_folder() -> Path:
    """Where the shipped recipes lie: inside the wheel, or in the source checkout."""
    packaged = Path(str(importlib.resources.files("sparkquant"))) / "_recipes"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parent.parent / "recipes"


def recipe_names() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def load_recipe(recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe) -> Recipe:
    """A recipe by shipped name, by path to a YAML file, or from plain data."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return _resolved(dict(recipe), Document(None, "recipe"))
    if not isinstance(recipe, str | os.PathLike):
        raise RecipeError(f"a recipe is a name, a path or plain data, not {type(recipe).__name__}", hint=HINT)
    path = find_recipe(recipe)
    return recipe_from_text(_read(path), source=str(path) if path.parent != recipe_folder() else path.name)


def recipe_from_text(text: str, *, source: str, extendable: bool = True) -> Recipe:
    """Parse YAML text, resolving one level of `extends`."""
    document = Document(text, source)
    fields = document.value
    if not isinstance(fields, dict):
        raise RecipeError(f"{source}: a recipe is a map of keys, found {type(fields).__name__}", hint=HINT)
    if "extends" in fields and not extendable:
        where = document.place(("extends",), key=True)
        raise RecipeError(f"{where}: extends one level only", hint=f"let {source} stand on its own")
    return _resolved(fields, document, source=source, text=text)


def _resolved(fields: dict[str, Any], document: Document, *, source: str = "", text: str = "") -> Recipe:
    """Parse fields on top of the recipe that they extend; a wrong base hides none of their own faults."""
    faults: list[Problem] = []
    if "extends" in fields:
        base = fields.pop("extends")
        if isinstance(base, str) and base in recipe_names():
            fields = _extended(base, fields)
        else:
            near = difflib.get_close_matches(str(base), recipe_names(), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"shipped: {', '.join(recipe_names())}"
            faults.append(Problem(document.place(("extends",)), f"no recipe {base!r}", hint))
    return parse_recipe(fields, source=source, text=text, document=document, baseless=faults)


def _extended(base: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Maps are merged, everything else is replaced; with other families, classes that they lack are not inherited."""
    parent = recipe_from_text(_read(recipe_folder() / f"{base}.yaml"), source=f"{base}.yaml", extendable=False)
    merged: dict[str, Any] = parent.as_json()
    families = fields.get("families")
    if isinstance(families, list) and (known := [name for name in layouts.family_names() if name in families]):
        possible = frozenset().union(*(layouts.family_layout(name).linear_classes for name in known))
        merged["schemes"] = {name: scheme for name, scheme in merged["schemes"].items() if name in possible}
    for key, value in fields.items():
        inherits = isinstance(value, dict) and key in ("target", "schemes", "accept", "unprotect", "calibration")
        merged[key] = {**merged.get(key, {}), **value} if inherits else value
    return merged


def find_recipe(recipe: str | os.PathLike[str]) -> Path:
    """The file of a shipped name or of a path; RecipeError with the nearest names otherwise."""
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        try:
            if path.is_file():
                return path
        except (OSError, ValueError) as error:
            raise RecipeError(f"{str(path)[:200]!r}: {error}", hint="check the path") from None
        raise RecipeError(f"{path}: no such recipe file", hint="pass a shipped name or the path of a YAML file")
    if str(recipe) in recipe_names():
        return recipe_folder() / f"{recipe}.yaml"
    near = difflib.get_close_matches(str(recipe), recipe_names(), n=1)
    raise RecipeError(
        f"no recipe {str(recipe)!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
        hint=f"shipped: {', '.join(recipe_names())}; or pass the path of a YAML file",
    )


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise RecipeError(f"{path}: too large for a recipe", hint="a recipe is a page of YAML")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}", hint="check the path") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not UTF-8 text", hint="save it as UTF-8") from None
