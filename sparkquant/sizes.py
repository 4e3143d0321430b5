"""What config.json says of the shapes of weights: formulas in letters, and the values of the letters.

    q_proj of Qwen3.5: "2*A*D|A*D, H", with A = num_attention_heads, D = head_dim, H = hidden_size

A letter that the config does not state, or states in a form that is not known, is not checked: formulas that contain it
say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparkquant.errors import Problem
from sparkquant.layers import Layout, Placement

LETTERS: Mapping[str, tuple[str, ...]] = {
    "H": ("hidden_size",),
    "V": ("vocab_size",),
    "I": ("intermediate_size",),
    "Im": ("moe_intermediate_size",),
    "Is": ("shared_expert_intermediate_size",),
    "E": ("num_experts", "n_routed_experts", "num_local_experts"),
    "A": ("num_attention_heads",),
    "K": ("num_key_value_heads",),
    "D": ("head_dim",),
    "Kl": ("linear_num_key_heads",),
    "Vl": ("linear_num_value_heads",),
    "Dk": ("linear_key_head_dim",),
    "Dv": ("linear_value_head_dim",),
    "rq": ("q_lora_rank",),
    "rkv": ("kv_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "v": ("v_head_dim",),
    "h": ("mamba_n_heads", "mamba_num_heads"),
    "p": ("mamba_d_head", "mamba_head_dim"),
    "G": ("mamba_n_groups", "n_groups", "mamba_ngroups"),
    "N": ("mamba_d_state", "ssm_state_size", "state_size"),
}
"""By letter: the fields of config.json (of its text part) that state it, the first that is there counts."""

Sizes = Mapping[str, tuple[str, Any]]


def sizes_of(config: Mapping[str, Any], own: Mapping[str, tuple[str, Any]]) -> Sizes:
    """The letters that a config states; `own` are the family's, which come first: a value of None is not checked."""
    fields = _text(config)
    found: dict[str, tuple[str, Any]] = {}
    for letter, keys in LETTERS.items():
        key = next((key for key in keys if _is_stated(fields.get(key))), None)
        if key is not None:
            found[letter] = (key, fields[key])
    return {letter: entry for letter, entry in {**found, **own}.items() if _is_stated(entry[1])}


def whole(config: Mapping[str, Any], *keys: str) -> int | None:
    """The product of some fields of a config, or None when one is no number."""
    fields = _text(config)
    product = 1
    for key in keys:
        value = fields.get(key)
        if type(value) is not int:
            return None
        product *= value
    return product


_PARTS = ("text_config", "vision_config")
_ALWAYS = ("hidden_size", "num_hidden_layers")
_COUNTS = (*_ALWAYS, "num_attention_heads", "vocab_size")


def misstated(config: Mapping[str, Any]) -> str:
    """What of a config no loader reads as a size, in words; "" when nothing is wrong."""
    for key in _PARTS:
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            return f"{key} is {str(config[key])[:60]!r}, not an object"
    fields = _text(config)
    for key in _COUNTS:
        value = fields.get(key)
        if value is not None and (type(value) is not int or value < 1):
            return f"{key} is {value if type(value) is int else repr(value)[:60]}, not a positive whole number"
    return ""


def unstated(config: Mapping[str, Any]) -> str:
    """Which sizes that every model has a config leaves to the default of the engine's class, in words."""
    absent = [key for key in _ALWAYS if _text(config).get(key) is None]
    return f"does not state {' and '.join(absent)}: engines take the default of their class" if absent else ""


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def even_heads(config: Mapping[str, Any]) -> Sizes:
    """For families whose heads share hidden_size where no head_dim is stated."""
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    if whole(config, "head_dim") is not None or hidden is None or not heads:
        return {}
    return {"D": ("hidden_size / num_attention_heads", hidden // heads)}


def _is_stated(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(item) is int for item in value)
    return type(value) is int


def size_faults(
    layout: Layout, placements: Mapping[str, Placement], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Problem]:
    """Weights whose shape is none that config.json allows; `shapes` by the names of `placements`."""
    by_layer = any(isinstance(value, list) for _, value in layout.sizes.values())
    known: dict[tuple[str, int | None], list[frozenset[int] | None]] = {}
    for name, shape in shapes.items():
        placement = placements[name]
        formula = placement.rule.shape
        if not formula:
            continue
        key = formula, placement.layer if by_layer else None
        axes = known.get(key)
        if axes is None:
            axes = known[key] = [_allowed(axis, layout.sizes, placement.layer) for axis in formula.split(",")]
        if len(axes) != len(shape):
            yield Problem(name, f"is {list(shape)}, not [{formula}]", HINT)
            continue
        for axis, (allowed, size) in enumerate(zip(axes, shape, strict=True)):
            if allowed is not None and size not in allowed:
                said = _said(formula.split(",")[axis], layout.sizes)
                yield Problem(name, f"is {list(shape)}, yet config.json says {said}", HINT)
                break


def _allowed(axis: str, sizes: Sizes, layer: int | None) -> frozenset[int] | None:
    """The sizes that an axis may have; None when a letter of it is not known."""
    values = [_value(term.strip(), sizes, layer) for term in axis.split("|")]
    return None if None in values else frozenset(value for value in values if value is not None)


HINT = "check that config.json and every shard belong to the same checkpoint"


def _value(formula: str, sizes: Sizes, layer: int | None) -> int | None:
    """The value of a sum of products."""
    total = 0
    for product in formula.split("+"):
        value = 1
        for factor in product.split("*"):
            known = int(factor) if factor.isdecimal() else sizes.get(factor, ("", None))[1]
            if isinstance(known, list):
                known = known[layer] if layer is not None and layer < len(known) else None
            if known is None:
                return None
            value *= known
        total += value
    return total


def _said(axis: str, sizes: Sizes) -> str:
    letters = dict.fromkeys(
        factor for term in axis.strip().split("|") for part in term.split("+") for factor in part.split("*")
    )
    return ", ".join(f"{sizes[letter][0]} {str(sizes[letter][1])[:60]}" for letter in letters if letter in sizes)
