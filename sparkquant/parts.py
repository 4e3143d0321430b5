"""Whether layers are whole, by the classes of their tensors: mixers and MLPs, experts, parts of fused modules.

What config.json says of single layers is compared with what they hold, and a layer with others of its kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sparkquant.layers import LayerClass as C
from sparkquant.layers import Layout, Placement

MAX_LAYERS = 1_000
"""More layers than this are not counted up, whatever a config says."""

_LAYER = re.compile(r"(.*?(?:^|\.)layers)\.(\d{1,6})\.(.+)")

_PARTS: Mapping[C, C] = {
    C.ATTENTION_QKV: C.ATTENTION_QKV, C.ATTENTION_OUT: C.ATTENTION_QKV,
    C.MLA_Q: C.MLA_Q, C.MLA_KV: C.MLA_Q, C.MLA_OUT: C.MLA_Q,
    C.LINEAR_ATTENTION_QKVZ: C.LINEAR_ATTENTION_QKVZ, C.LINEAR_ATTENTION_OUT: C.LINEAR_ATTENTION_QKVZ,
    C.SSM_IN: C.SSM_IN, C.SSM_OUT: C.SSM_IN, C.SHORT_CONV: C.SHORT_CONV,
    C.MLP_GATE_UP: C.MLP_GATE_UP, C.MLP_DOWN: C.MLP_GATE_UP,
    C.EXPERTS_GATE_UP: C.EXPERTS_GATE_UP, C.EXPERTS_DOWN: C.EXPERTS_GATE_UP,
    C.SHARED_EXPERT_GATE_UP: C.SHARED_EXPERT_GATE_UP, C.SHARED_EXPERT_DOWN: C.SHARED_EXPERT_GATE_UP,
}  # fmt: skip
"""What a layer is made of, each part by its first class."""

_MIXERS = frozenset({C.ATTENTION_QKV, C.MLA_Q, C.LINEAR_ATTENTION_QKVZ, C.SSM_IN, C.SHORT_CONV})
_MLPS = frozenset({C.MLP_GATE_UP, C.EXPERTS_GATE_UP, C.SHARED_EXPERT_GATE_UP})

_WITHOUT_MLP = ("mamba2", "falcon_mamba", "zamba2")
"""Families whose layers are a mixer alone."""

_ONE_PART = ("nemotron_h",)
"""Families whose layers are a mixer or an MLP."""

_GROWING = ("zamba2",)
"""Families in which some layers hold all that others hold, and more."""

_ATTENDING = frozenset({C.ATTENTION_QKV, C.MLA_Q})
_RECURRENT = frozenset({C.LINEAR_ATTENTION_QKVZ, C.SSM_IN, C.SHORT_CONV})
_DECLARED: Mapping[str, frozenset[C]] = {
    **dict.fromkeys(
        ("full_attention", "sliding_attention", "attention", "deepseek_sparse_attention", "*"), _ATTENDING
    ),
    # Newer libraries write `linear_attention` for every kind of recurrence.
    **dict.fromkeys(("linear_attention", "recurrent", "mamba", "mamba2", "hybrid", "conv", "M"), _RECURRENT),
    "-": frozenset({C.MLP_GATE_UP}), "E": frozenset({C.EXPERTS_GATE_UP}),
}  # fmt: skip
"""What a layer of a declared kind holds, one of them."""

_MLP_KINDS = {"dense": C.EXPERTS_GATE_UP, "sparse": C.MLP_GATE_UP}
"""What a layer of a declared kind of MLP does not hold."""

TYPES = ("layer_types", "layers_block_type", "attn_type_list", "hybrid_override_pattern")
"""Where a config lists the kind of every layer."""


def broken_layers(
    layout: Layout, text: Mapping[str, Any], placements: Mapping[str, Placement]
) -> Iterator[tuple[str, str]]:
    """Layers that lack a whole part, each with what is wrong: such a layer looks like one of another kind."""
    layers = parts_of_layers(placements)
    kinds = {frozenset(parts) for parts in layers.values()}
    types, mlps = layer_types(text), _mlp_kinds(text) if layout.experts[0] else ()
    for place, parts in sorted(layers.items()):
        name = f"{place[0]}.{place[1]}"
        kind = types[place[1]] if place[1] < len(types) else ""
        wanted = _DECLARED.get(str(kind), frozenset())
        if layout.family in _ONE_PART:
            needed = [(_MIXERS | _MLPS, "attention, a recurrence or an MLP")]
        elif layout.family in _WITHOUT_MLP:
            needed = [(_MIXERS, "attention or a recurrence")]
        else:
            needed = [(_MIXERS, "attention or a recurrence"), (_MLPS, "an MLP or experts")]
        lost = [what for classes, what in needed if not parts & classes]
        bigger = [kind for kind in kinds if parts < kind or (parts & _MLPS and parts & _MLPS < kind & _MLPS)]
        if lost:
            yield name, f"holds no tensor of {' nor of '.join(lost)}: a whole part is missing"
        elif place[1] < len(mlps) and (other := _MLP_KINDS.get(mlps[place[1]], C.STATE)) in parts:
            yield name, f"has {mlps[place[1]]} MLPs by config.json, yet holds {other}"
        elif wanted and not parts & wanted:
            have = ", ".join(sorted(map(str, parts)))
            yield name, f"is {kind!r} by config.json, yet holds {have} and no {' or '.join(sorted(map(str, wanted)))}"
        elif bigger and layout.family not in _GROWING:
            more = sorted(map(str, min(bigger, key=len) - parts - (_MIXERS if parts & _MIXERS else frozenset())))
            yield name, f"holds nothing of {', '.join(more)}, which layers like it have: a whole part is missing"


def parts_of_layers(placements: Mapping[str, Placement]) -> dict[tuple[str, int], set[C]]:
    """By (path to the layers, number): what a decoder layer is made of."""
    found: dict[tuple[str, int], set[C]] = defaultdict(set)
    for name, placement in placements.items():
        match = _LAYER.fullmatch(name)
        if match is not None and placement.layer_class not in (C.VISION, C.AUDIO, C.MTP):
            parts = found[match[1], int(match[2])]
            if placement.layer_class in _PARTS:
                parts.add(_PARTS[placement.layer_class])
    return found


def layer_types(text: Mapping[str, Any]) -> tuple[Any, ...]:
    """The kind of every layer, as config.json lists or counts them; empty when it does so for none or for some."""
    number = text.get("num_hidden_layers")
    listed = next((text[key] for key in TYPES if isinstance(text.get(key), list | str)), None)
    if type(number) is not int or not 0 < number <= MAX_LAYERS:
        return ()
    pattern = text.get("block_types")
    if listed is None and isinstance(pattern, list) and pattern:  # repeated over the layers
        return tuple(pattern[index % len(pattern)] for index in range(number))
    every = text.get("full_attention_interval")
    if listed is None and type(every) is int and every > 0:
        return tuple("linear_attention" if (index + 1) % every else "full_attention" for index in range(number))
    return tuple(listed) if listed is not None and len(listed) == number else ()


def shares_indexers(text: Mapping[str, Any]) -> bool:
    """Whether some layers of sparse attention use the indexer of an earlier one, and have none."""
    keys = ("indexer_types", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset")
    return any(text.get(key) is not None for key in keys)


def short_types(text: Mapping[str, Any]) -> str:
    """What is wrong when config.json lists the kinds of fewer layers than it has; "" when it does not."""
    number = text.get("num_hidden_layers")
    for key in TYPES:
        listed = text.get(key)
        if isinstance(listed, list | str) and type(number) is int and len(listed) < number:
            return f"{key} names the kinds of {len(listed)} layers, num_hidden_layers is {number}"
    return ""


def _mlp_kinds(text: Mapping[str, Any]) -> tuple[str, ...]:
    """`dense` or `sparse` for every layer, as far as config.json says so."""
    number, listed = text.get("num_hidden_layers"), text.get("mlp_layer_types")
    if type(number) is not int or not 0 < number <= MAX_LAYERS:
        return ()
    if isinstance(listed, list):
        return tuple(map(str, listed)) if len(listed) == number else ()
    first = text.get("first_k_dense_replace", text.get("num_dense_layers"))
    if type(first) is not int or text.get("moe_layer_freq", 1) != 1:
        return ()
    return tuple("dense" if index < first else "sparse" for index in range(number))


def absent_experts(total: int, names: Iterable[str]) -> Iterator[str]:
    """Experts that a layer lacks, of `total` that config.json counts (0: it does not), or one of two stacks of them."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    stacks: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            found[match[1], match[3]].add(int(match[2]))
        elif name.endswith(_STACKS):
            parent, _, leaf = name.rpartition(".")
            stacks[parent].add(leaf)
    for (parent, part), experts in found.items():
        count = total if 0 < total <= MAX_EXPERTS else max(experts) + 1
        lost = [expert for expert in range(min(count, MAX_EXPERTS)) if expert not in experts]
        yield from (f"{parent}.{expert}.{part}" for expert in lost[:MAX_TOLD])
        if len(lost) > MAX_TOLD:
            yield f"{parent}.*.{part} ({len(lost):,} of {count:,} experts)"
    for parent, leaves in stacks.items():
        yield from (f"{parent}{stack.removeprefix('.experts')}" for stack in _STACKS if stack[9:] not in leaves)


_NUMBERED = re.compile(r"(.*\bexperts)\.(\d{1,6})\.(.+)")
_STACKS = (".experts.gate_up_proj", ".experts.down_proj")
MAX_EXPERTS = 10_000
MAX_TOLD = 32
"""Experts of one layer that are named one by one."""


def absent_parts(layout: Layout, placements: Mapping[str, Placement]) -> Iterator[str]:
    """Parts of fused modules of which others are stored: q, k and v; gate and up; qkv and z."""
    fused = _fused_parts(layout)
    found: dict[tuple[str, tuple[str, str]], set[str]] = defaultdict(set)
    for placement in placements.values():
        rule = placement.rule
        if rule.fused and rule.linear:
            parent, _, leaf = placement.name.removesuffix(".weight").rpartition(".")
            found[parent, (_split(rule.pattern)[0], rule.fused)].add(leaf)
    for (parent, key), leaves in found.items():
        yield from (f"{parent}.{leaf}.weight" for leaf in sorted(fused.get(key, frozenset()) - leaves))


def _fused_parts(layout: Layout) -> dict[tuple[str, str], frozenset[str]]:
    """By pattern of the parent and fused leaf: the leaves that every such module has."""
    found: dict[tuple[str, str], frozenset[str]] = defaultdict(frozenset)
    for rule in layout.rules:
        if rule.fused and rule.linear and not rule.optional:
            parent, leaf = _split(rule.pattern)
            if leaf != "q_a_proj" or "rq" in layout.sizes:  # queries without a latent rank have one projection
                found[parent, rule.fused] |= frozenset(_spelled(leaf))
    return found


def _split(pattern: str) -> tuple[str, str]:
    """(pattern of the parent, pattern of the leaf) of a rule for weights."""
    parent, _, leaf = pattern.removesuffix(r"\.weight").rpartition(r"\.")
    return parent, leaf


_CHOICE = re.compile(r"\[(\w+)\]|\(\?:([\w|]+)\)")


def _spelled(leaf: str) -> list[str]:
    """The names that a leaf's pattern stands for: `[qkv]_proj`, `(?:gate|up)_proj`."""
    match = _CHOICE.search(leaf)
    if match is None:
        return [leaf]
    choices = list(match[1]) if match[1] else match[2].split("|")
    return [name for choice in choices for name in _spelled(leaf[: match.start()] + choice + leaf[match.end() :])]


_ROUTER = re.compile(r"(?:.*\.)?(?:gate|router)(?:\.layer|\.proj)?\.weight")
_PER_LAYER = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")


def absent_companions(layout: Layout, text: Mapping[str, Any], placements: Mapping[str, Placement]) -> Iterator[str]:
    """What must come with something else: router and shared expert with experts, Gemma's tables with their users."""
    layers: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name, placement in placements.items():
        match = _LAYER.fullmatch(name)
        if match is not None and placement.layer_class not in (C.VISION, C.AUDIO, C.MTP):
            layers[match[1], int(match[2])].add(match[3])
    shared = layout.sizes.get("Is", ("", 0))[1]
    for place, leaves in sorted(layers.items()):
        at = f"{place[0]}.{place[1]}"
        classes = {placements[f"{at}.{leaf}"].layer_class for leaf in leaves}
        routed, router = C.EXPERTS_GATE_UP in classes, any(map(_ROUTER.fullmatch, leaves))
        if routed != router and C.EXPERTS_GATE_UP in layout.classes:
            yield f"{at} ({'router' if routed else 'experts'})"
        if routed and shared and C.SHARED_EXPERT_GATE_UP in layout.classes - classes:
            yield f"{at} (shared expert)"
        yield from _absent_keys(layout, text, at, place[1], leaves)
    if layout.family in ("gemma3n", "gemma4"):
        yield from _absent_tables(text, placements)


def _absent_keys(layout: Layout, text: Mapping[str, Any], at: str, number: int, leaves: set[str]) -> Iterator[str]:
    """Keys and values of layers that do not read those of an earlier one."""
    layers, sharing = text.get("num_hidden_layers"), text.get("num_kv_shared_layers", 0)
    if layout.family not in ("gemma3n", "gemma4") or type(layers) is not int or type(sharing) is not int:
        return
    if number < layers - sharing:
        parts = ("k_proj",) if text.get("attention_k_eq_v") else ("k_proj", "v_proj")
        yield from (f"{at}.{name}" for part in parts if (name := f"self_attn.{part}.weight") not in leaves)


def _absent_tables(text: Mapping[str, Any], placements: Mapping[str, Placement]) -> Iterator[str]:
    users = [name for name in placements if name.endswith(".per_layer_input_gate.weight")]
    parent = users[0].partition("layers.")[0] if users else ""
    yield from (name for leaf in _PER_LAYER if users and (name := f"{parent}{leaf}.weight") not in placements)
    mixed = next((name for name in placements if ".altup." in name), "")
    inputs = text.get("altup_num_inputs")
    for index in range(inputs - 1 if mixed and type(inputs) is int and inputs < 100 else 0):
        for part in ("altup_projections", "altup_unembed_projections"):
            if (name := f"{mixed.partition('layers.')[0]}{part}.{index}.weight") not in placements:
                yield name
