"""What a model cannot do without, by its own layers and names alone: for folders whose source is not given."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sparkquant.layers import LayerClass, Layout, TensorRule
from sparkquant.report import Check
from sparkquant.verification.catalogue import finding, skipped
from sparkquant.verification.subject import Subject

_DRAFT_TOP: Mapping[str, tuple[str, ...]] = {
    "qwen3_5": ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    "qwen3_5_moe": ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    "qwen3_next": ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    "qwen4_exp": ("fc_embedding", "fc_hidden", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
}
"""By family: what lies directly below `mtp`. Their draft layers hold what a full-attention layer holds."""

_NEXTN = ("eh_proj", "enorm", "hnorm")
"""What a draft layer behind the last layer holds besides a decoder layer."""

_DRAFT_LAYER = re.compile(r"mtp\.layers\.(\d{1,4})\.(.+)")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.(.+)")
_BLOCK = re.compile(r"(?:.*visual\.blocks)\.(\d{1,4})\.(.+)")
_DECODER = re.compile(r"model\.(?:language_model\.)?layers\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.*\bexperts)\..*")

_QWEN_TOWER = ("patch_embed.proj", "pos_embed", "merger.norm", "merger.linear_fc1", "merger.linear_fc2")
_TOWERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "qwen3_5": ("model.visual", _QWEN_TOWER),
    "qwen3_5_moe": ("model.visual", _QWEN_TOWER),
    "qwen4_exp": ("model.visual", ("patch_embed", "merger")),
    "glm5_next": ("model.visual", ("patch_embed", "merger")),
}
"""By family: the tower's name, and what it holds besides its blocks (modules, or regions of some)."""


def check_required(subject: Subject) -> Iterator[Check]:
    """tensors.required: embedding and final norm."""
    layout = subject.layout
    if layout is None:
        yield from skipped("no layout knows this model_type", "tensors.required")
        return
    lost = [rule for rule in _required(layout) if not _holds(subject.checkpoint.tensors, rule)]
    if lost:
        inherited = subject.source is not None and not any(_holds(subject.source.tensors, rule) for rule in lost)
        names = [_name(subject, rule) for rule in lost]
        yield finding("tensors.required", "not stored: no model runs without it", names, inherited=inherited)


def _required(layout: Layout) -> Iterator[TensorRule]:
    for layer_class in (LayerClass.EMBED, LayerClass.NORM):
        yield from [r for r in layout.rules if r.layer_class is layer_class and "layers" not in r.pattern][:1]


def _holds(names: Iterable[str], rule: TensorRule) -> bool:
    """Whether the weight is there; a quantized embedding is, by whatever its module holds."""
    module = re.compile(rule.pattern.removesuffix(r"\.weight") + r"\.[a-z_0-9]+")
    return any(module.fullmatch(name) for name in names)


def _name(subject: Subject, rule: TensorRule) -> str:
    """The rule's name under the prefix of the stored layers."""
    leaf = re.findall(r"\w+", rule.pattern.removesuffix(r"\.weight"))[-1]
    parent = next((found[0] for name in subject.modules if (found := re.match(r".*?(?=layers\.)", name))), "")
    return f"{parent}{leaf}.weight"


def incomplete_draft(subject: Subject, stored: Iterable[str]) -> set[str]:
    """What is missing in a draft head of which something is stored."""
    layout, stored = subject.layout, set(stored)
    if layout is None:
        return set()
    if layout.mtp.by_index:
        return _incomplete_nextn(subject, stored)
    top = _DRAFT_TOP.get(layout.family, ())
    missing = {name for leaf in top if (name := f"mtp.{leaf}") not in stored}
    model: set[str] = set()
    for leaves in _by_index(subject.modules, _DECODER).values() if top else ():
        if any(leaf.startswith("self_attn") for leaf in leaves):
            model |= leaves
    model = {leaf for leaf in model if not leaf.startswith("ple.")}
    layers = _by_index(stored, _DRAFT_LAYER)
    number = subject.checkpoint.text_config.get(layout.mtp.config_key)
    count = number if type(number) is int and 0 < number < 100 else len(layers)
    for index in range(count):
        missing |= {f"mtp.layers.{index}.{leaf}" for leaf in model - layers.get(index, set())}
    return missing


def _incomplete_nextn(subject: Subject, stored: set[str]) -> set[str]:
    """A layer behind the last one holds what all layers hold, and the last one's experts."""
    decoder = _by_index((name for name in subject.modules if name not in stored and ".visual" not in name), _LAYER)
    common = set.intersection(*decoder.values()) if decoder else set()
    common |= {leaf for leaf in decoder.get(max(decoder, default=0), set()) if leaf.startswith("mlp.")}
    parent = next((found[0] for name in stored if (found := re.match(r".*?layers\.", name))), "model.layers.")
    layers = _by_index(stored, _LAYER)
    return {f"{parent}{index}.{leaf}" for index, leaves in layers.items() for leaf in (common | set(_NEXTN)) - leaves}


def _by_index(names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = defaultdict(set)
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            expert = _EXPERT.fullmatch(match[2])
            found[int(match[1])].add(match[2] if expert is None else expert[1])
    return found


def incomplete_tower(subject: Subject, stored: Iterable[str], tower: Mapping[str, Any]) -> Iterator[str]:
    """What is missing in a vision tower of which something is stored."""
    stored = set(stored)
    blocks = _by_index(stored, _BLOCK)
    every = set().union(*blocks.values()) if blocks else set()
    depth = tower.get("depth")
    count = depth if type(depth) is int and 0 < depth < 1_000 else len(blocks)
    for index in range(count):
        yield from (f"model.visual.blocks.{index}.{leaf}" for leaf in sorted(every - blocks.get(index, set())))
    name, parts = _TOWERS.get(subject.layout.family if subject.layout is not None else "", ("", ()))
    for part in parts:
        if not any(module == f"{name}.{part}" or module.startswith(f"{name}.{part}.") for module in stored):
            yield f"{name}.{part}"
