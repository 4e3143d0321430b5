"""The front matter of a model card: what the hub shows and searches. License, language and tags are the source's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from sparkquant.errors import RecipeError
from sparkquant.positions import Document

MAX_CARD_BYTES = 2_000_000
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag", "library_name")
"""Fields that describe the source and the result alike."""

_FRONT = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_BITS = {"w4a16": "int4", "w8a16": "int8", "nvfp4a16": "nvfp4", "nvfp4": "nvfp4", "fp8": "fp8", "fp8_block": "fp8"}


def card_metadata(path: Path) -> dict[str, Any]:
    """The front matter of a card; empty when there is none, or none that plain YAML can say.

    A card comes with the source and is a stranger's: no alias, no tag, no type but text and lists of text is taken.
    """
    text = card_of(path)
    front = _FRONT.match(text)
    if front is None:
        return {}
    try:
        fields = Document(front[1], path.name).value
    except RecipeError:
        return {}
    return {str(key): value for key, value in fields.items()} if isinstance(fields, Mapping) else {}


def card_of(path: Path) -> str:
    """The text of a card; empty when there is none that can be read."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_CARD_BYTES:
            return ""
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def result_metadata(
    source: Mapping[str, Any], *, base_model: str, schemes: Iterable[str], status: str, quant_method: str
) -> dict[str, Any]:
    """Front matter of a result.

    source      front matter of the source's card
    base_model  hub id of the source; without one neither it nor the relation is stated
    schemes     labels that the plan uses, like `w4a16 g128`
    """
    fields: dict[str, Any] = {}
    if base_model:
        fields |= {"base_model": [base_model], "base_model_relation": "quantized"}
    for key in CARRIED:
        value = source.get(key)
        if _is_text(value) or (isinstance(value, list) and value and all(map(_is_text, value))):
            fields[key] = value
    kinds = {_BITS[label.split()[0]] for label in schemes if label.split()[0] in _BITS}
    ours = ["sparkquant", f"sparkquant-{status}", *filter(None, [quant_method]), *sorted(kinds)]
    given = source.get("tags")
    theirs = [tag for tag in given if _is_text(tag)] if isinstance(given, list) else []
    fields["tags"] = list(dict.fromkeys([*theirs, *ours]))
    return fields


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()


def front_matter(fields: Mapping[str, Any]) -> str:
    """Fields as the block that begins a card."""
    return f"---\n{yaml.safe_dump(dict(fields), sort_keys=False, allow_unicode=True, width=1000)}---\n"
