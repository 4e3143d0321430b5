"""Whether the parts of a model are whole, by the names of its modules alone: layers, draft head, vision tower.

Names are those of modules (`....q_proj`) or of tensors; what is missing is told by name, so that it can be fetched.
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

# Draft heads.

_QWEN_DRAFT = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
_DRAFT_TOP: Mapping[str, tuple[str, ...]] = {
    "qwen3_5": _QWEN_DRAFT,
    "qwen3_5_moe": _QWEN_DRAFT,
    "qwen3_next": _QWEN_DRAFT,
    "qwen4_exp": (
        "fc_embedding", "fc_hidden", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "hyper_connection_mixer.hc_norm",
        "hyper_connection_mixer.input_mix_weight_down", "hyper_connection_mixer.input_mix_weight_up",
    ),
}  # fmt: skip
"""By family: what lies directly below `mtp`. Their draft layers hold what a full-attention layer holds."""

_NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
"""What a draft layer behind the last layer holds besides a decoder layer."""

_DRAFT_LAYER = re.compile(r"mtp\.layers\.(\d{1,4})\.(.+)")
_LAYER = re.compile(r"(.*?(?:^|\.)layers)\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.*\bexperts)\..*")

Leaves = Mapping[int, set[str]]


def incomplete_draft(layout: Layout, text: Mapping[str, Any], modules: Iterable[str], draft: Iterable[str]) -> set[str]:
    """What is missing in a draft head of which something is stored.

    text    the text part of config.json
    modules all modules of the checkpoint; `draft` are those of the draft head
    """
    stored = set(draft)
    decoder = _decoder(name for name in modules if name not in stored)
    if not stored:
        return set()
    if layout.mtp.by_index:
        return _incomplete_nextn(text, decoder, stored)
    layers = _by_index(stored, _DRAFT_LAYER)
    if layout.family == "nemotron_h":
        return _incomplete_flat(text, decoder, layers)
    top = _DRAFT_TOP.get(layout.family, ())
    missing = {name for leaf in top if (name := f"mtp.{leaf}") not in stored}
    attending = [leaves for leaves in decoder.values() if any(leaf.startswith("self_attn") for leaf in leaves)]
    model = {leaf for leaves in attending if top for leaf in leaves if not leaf.startswith("ple.")}
    for index in _indices(text.get(layout.mtp.config_key), 0, layers):
        missing |= {f"mtp.layers.{index}.{leaf}" for leaf in model - layers.get(index, set())}
    return missing


def _incomplete_nextn(text: Mapping[str, Any], decoder: Leaves, stored: set[str]) -> set[str]:
    """A layer behind the last one holds what the decoder layer holds that is most like it."""
    parent = next((found[1] for name in stored if (found := _LAYER.match(name))), "model.layers")
    layers = _by_index(stored, re.compile(rf"{re.escape(parent)}\.(\d{{1,6}})\.(.+)"))
    missing: set[str] = set()
    for index in _indices(text.get("num_nextn_predict_layers"), max(decoder, default=-1) + 1, layers):
        leaves = layers.get(index, set())
        alike = max(decoder.values(), key=lambda kind: (len(kind & leaves), len(kind)), default=set())
        missing |= {f"{parent}.{index}.{leaf}" for leaf in (alike | set(_NEXTN)) - leaves}
    return missing


def _incomplete_flat(text: Mapping[str, Any], decoder: Leaves, layers: Leaves) -> set[str]:
    """Nemotron: one mixer a draft layer, the projection of both inputs before the first, a norm behind the last."""
    pattern = text.get("mtp_hybrid_override_pattern")
    declared = len(pattern) if isinstance(pattern, str) and len(pattern) < 100 else 0
    count = max(declared, max(layers, default=-1) + 1)
    missing: set[str] = set()
    for index in range(count):
        leaves = layers.get(index, set())
        alike = max(decoder.values(), key=lambda kind: (len(kind & leaves), len(kind)), default=set())
        wanted = alike if len(alike & leaves) > 1 else {"norm", "mixer"}
        wanted |= {"eh_proj", "enorm", "hnorm"} if index == 0 else set()
        wanted |= {"final_layernorm"} if index == count - 1 else set()
        missing |= {f"mtp.layers.{index}.{leaf}" for leaf in wanted - leaves}
    return missing


def _indices(declared: Any, first: int, found: Leaves) -> list[int]:
    """The layers that a config declares, or else those that are found."""
    counted = type(declared) is int and 0 < declared < 100
    return list(range(first, first + declared)) if counted else sorted(found) or [first]


def _decoder(names: Iterable[str]) -> Leaves:
    """The leaves of every decoder layer."""
    outside = re.compile(r"(?:.*\.)?(?:mtp|visual|vision_tower|audio_tower|encoder)\..*")
    layer = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.(.+)")
    return _by_index((name for name in names if not outside.match(name)), layer)


def _by_index(names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, set[str]]:
    """Leaves by layer; all experts of a layer are one leaf."""
    found: dict[int, set[str]] = defaultdict(set)
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            expert = _EXPERT.fullmatch(match[2])
            found[int(match[1])].add(match[2] if expert is None else expert[1])
    return found


# Towers.

_BLOCK = re.compile(r"(.*(?:visual\.blocks|vision_tower\.(?:transformer|encoder)\.layers))\.(\d{1,4})\.(.+)")
_QWEN_TOWER = (
    "patch_embed.proj", "patch_embed.proj.bias", "pos_embed", "merger.norm", "merger.norm.bias", "merger.linear_fc1",
    "merger.linear_fc1.bias", "merger.linear_fc2", "merger.linear_fc2.bias",
)  # fmt: skip
_TOWERS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "qwen3_5": ("model.visual", "blocks", _QWEN_TOWER),
    "qwen3_5_moe": ("model.visual", "blocks", _QWEN_TOWER),
    "qwen4_exp": ("model.visual", "blocks", _QWEN_TOWER),
    "glm5_next": ("model.visual", "blocks", ("patch_embed", "merger")),
    "mistral4": ("vision_tower", "transformer.layers", ("ln_pre", "patch_conv")),
    "gemma4": ("model.vision_tower", "encoder.layers", ()),
}
"""By family: the tower's name, where its blocks are, and what it holds besides (modules, or regions of some)."""

_BRIDGES: Mapping[str, tuple[str, ...]] = {
    "mistral4": tuple(
        f"multi_modal_projector.{part}" for part in ("norm", "linear_1", "linear_2", "patch_merger.merging_layer")
    ),
    "gemma3n": ("model.embed_vision.embedding_projection",),
    "gemma4": ("model.embed_vision.embedding_projection",),
}
"""By family: what leads from the tower into the model."""


def incomplete_tower(layout: Layout, tower: Mapping[str, Any], stored: Iterable[str]) -> Iterator[str]:
    """What is missing in a vision tower of which something is stored; `tower` is vision_config."""
    stored = set(stored)
    if not stored:
        return
    path, region, parts = _TOWERS.get(layout.family, ("", "", ()))
    blocks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in stored:
        if match := _BLOCK.fullmatch(name):
            blocks[match[1]][int(match[2])].add(match[3])
    depth = tower.get("depth", tower.get("num_hidden_layers"))
    depth = depth if type(depth) is int and 0 < depth < MAX_LAYERS else 0
    if region and depth and not blocks:
        yield f"{path}.{region}"
    for place, found in sorted(blocks.items()):
        every = set().union(*found.values())
        for index in range(max(depth, len(found))):
            yield from (f"{place}.{index}.{leaf}" for leaf in sorted(every - found.get(index, set())))
    for part in (*(f"{path}.{part}" for part in parts), *_BRIDGES.get(layout.family, ())):
        inside = part.endswith((".patch_embed", ".merger"))
        if part not in stored and not (inside and any(module.startswith(f"{part}.") for module in stored)):
            yield part


# Layers.

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

TYPES = ("layer_types", "layers_block_type", "block_types", "attn_type_list", "hybrid_override_pattern")
"""Where a config lists the kind of every layer."""


def broken_layers(
    layout: Layout, text: Mapping[str, Any], placements: Mapping[str, Placement]
) -> Iterator[tuple[str, str]]:
    """Layers that lack a whole part, each with what is wrong: such a layer looks like one of another kind."""
    layers = parts_of_layers(placements)
    kinds = {frozenset(parts) for parts in layers.values()}
    types = layer_types(text)
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
    """The kind of every layer as config.json lists them; empty when it does not, or not for every layer."""
    number = text.get("num_hidden_layers")
    listed = next((text[key] for key in TYPES if isinstance(text.get(key), list | str)), "")
    return tuple(listed) if type(number) is int and len(listed) == number else ()


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
