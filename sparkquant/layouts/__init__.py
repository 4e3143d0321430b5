"""One file per model family: tensor names -> classes, fusion groups, draft head, engine names.

A family file defines `MODEL_TYPES` (values of `model_type` in config.json), `ARCHITECTURES` (model classes that load
it), `layout(config) -> Layout`, and where config.json has words of its own for sizes `sizes(config)` (see
`sparkquant.sizes`). Adding a family is adding such a file and its tests: it is found here by its presence, nothing else
has to be edited.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from sparkquant.errors import UnknownFamily
from sparkquant.layers import Layout
from sparkquant.sizes import sizes_of


@cache
def family_names() -> list[str]:
    """The families that a recipe may list, sorted: the files here that are no shared parts."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))


def _family(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


@cache
def _families() -> dict[str, ModuleType]:
    return {model_type: module for module in map(_family, family_names()) for model_type in module.MODEL_TYPES}


def _family_of(model_type: object) -> ModuleType | None:
    """The family of a `model_type`. Most are called like it: the others are not even imported then."""
    if not isinstance(model_type, str):
        return None
    if model_type in family_names():
        namesake = _family(model_type)
        if model_type in namesake.MODEL_TYPES:
            return namesake
    return _families().get(model_type)


def model_types() -> list[str]:
    """Every `model_type` that has a layout, sorted."""
    return sorted(_families())


def family_layout(family: str) -> Layout:
    """The layout of a family without a checkpoint: for recipe checks that only need its classes."""
    module = _family(family)
    return _layout(module, {"model_type": module.MODEL_TYPES[0]})


def layout_for(config: Mapping[str, Any], *, source: str = "config.json") -> Layout:
    """The layout of a checkpoint, chosen by `model_type` alone: release names say nothing about tensors."""
    model_type = config.get("model_type")
    module = _family_of(model_type)
    if module is None:
        near = difflib.get_close_matches(str(model_type), model_types(), n=1)
        raise UnknownFamily(
            f"{source}: model_type {model_type!r} has no layout" + (f"; did you mean {near[0]!r}?" if near else ""),
            hint=f"known: {', '.join(model_types())}. A new family is one file in sparkquant/layouts/",
        )
    return _layout(module, config)


def _layout(module: ModuleType, config: Mapping[str, Any]) -> Layout:
    result: Layout = module.layout(config)
    own = module.sizes(config) if hasattr(module, "sizes") else {}
    return replace(
        result, architectures=module.ARCHITECTURES, activation=_activation(config), sizes=sizes_of(config, own)
    )


def _activation(config: Mapping[str, Any]) -> str:
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) else config
    named = (fields.get(key) for key in ("mlp_hidden_act", "hidden_activation", "hidden_act"))
    return next((name for name in named if isinstance(name, str)), "")


def families_of(architecture: str) -> list[str]:
    """The families that a model class loads, sorted."""
    found = {m.__name__.rpartition(".")[2] for m in _families().values() if architecture in m.ARCHITECTURES}
    return sorted(found)
