"""Whether draft head and vision tower are whole, by the names of modules alone.

Names are those of modules (`....q_proj`) or of tensors; what is missing is told by name, so that it can be fetched.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sparkquant.layers import Layout

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
        alike = max(decoder.values(), key=lambda kind: (len(kind & leaves), -len(kind)), default=set())
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
