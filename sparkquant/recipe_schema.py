"""JSON Schema of a recipe file: completion in editors, and checks in the CI of model repositories."""

from __future__ import annotations

import json
from typing import Any

from sparkquant.layers import MINIMUM_BITS, PROTECTED, UNPROTECTABLE, LayerClass
from sparkquant.methods import DELEGATED, NATIVE, OPTIONS
from sparkquant.recipe import Recipe, scheme_json_schema


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file, for editors and for CI of model repositories."""
    schema = Recipe.model_json_schema(by_alias=True)
    for hidden in ("source", "text"):
        schema["properties"].pop(hidden)
    classes = {"enum": [str(c) for c in LayerClass if c not in PROTECTED]}
    schema["properties"]["schemes"]["propertyNames"] = classes
    schema["properties"]["schemes"]["properties"] = {
        str(c): scheme_json_schema(bits=least) for c, (least, _) in MINIMUM_BITS.items()
    }
    schema["properties"]["unprotect"]["propertyNames"] = {"enum": [str(c) for c in sorted(UNPROTECTABLE)]}
    schema["properties"]["method"] = _method_schema(schema["$defs"].pop("Method"))
    schema["properties"]["extends"] = {"type": "string", "description": "a shipped recipe to start from"}
    schema["required"] = []
    schema["anyOf"] = [{"required": ["extends"]}, {"required": ["name", "summary", "families", "schemes"]}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "sparkquant recipe",
    }


def _method_schema(method: dict[str, Any]) -> dict[str, Any]:
    """A name, or a map with the options of that name."""
    names, fields = [*NATIVE, *DELEGATED], method["properties"]
    spelled_out = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, **{option: fields[option] for option in OPTIONS.get(name, ())}},
            "required": [] if name == fields["name"]["default"] else ["name"],
            "additionalProperties": False,
        }
        for name in names
    ]
    return {"description": method["description"], "anyOf": [{"type": "string", "enum": names}, *spelled_out]}


def recipe_schema_text() -> str:
    """The JSON Schema of a recipe as stable text."""
    return json.dumps(recipe_schema(), indent=2, sort_keys=True) + "\n"
