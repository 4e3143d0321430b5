"""Whether a checkpoint is whole: what every layer of a kind must hold, in which shapes, and what lies outside them.

A layer's kind is read off the parts that occur in it, so hybrid families need no table: layers with the same parts must
hold the same tensors, and a part that only works with another (gate and up with down) must not be alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import Problem
from sparkquant.layers import LayerClass as C
from sparkquant.layers import Layout, Placement

AGAIN = "fetch the checkpoint again: a part of it is missing"
OTHER = "check that config.json and every shard belong to the same checkpoint"

_OUTSIDE = (C.VISION, C.AUDIO, C.MTP)
_PADDED = re.compile(r"(?:^|\.)0\d+(?=\.|$)")
_LAYER = re.compile(r"^(.*?(?:^|\.)layers)\.(\d+)\.(.+)$", re.ASCII)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

_WHOLE: tuple[tuple[C, ...], ...] = (
    (C.ATTENTION_QKV, C.ATTENTION_OUT),
    (C.MLA_Q, C.MLA_KV, C.MLA_OUT),
    (C.LINEAR_ATTENTION_QKVZ, C.LINEAR_ATTENTION_OUT),
    (C.SSM_IN, C.SSM_OUT),
    (C.MLP_GATE_UP, C.MLP_DOWN),
    (C.EXPERTS_GATE_UP, C.EXPERTS_DOWN, C.ROUTER),
    (C.SHARED_EXPERT_GATE_UP, C.SHARED_EXPERT_DOWN),
)
"""Classes that no layer has alone, where the family has them."""

_HIDDEN: Mapping[C, int] = {
    C.LM_HEAD: 1, C.ATTENTION_QKV: 1, C.ATTENTION_OUT: 0, C.LINEAR_ATTENTION_QKVZ: 1, C.LINEAR_ATTENTION_OUT: 0,
    C.MLP_GATE_UP: 1, C.MLP_DOWN: 0,
}  # fmt: skip
"""The axis that reads or writes the residual stream; blocks that read it beside the embedding are twice as wide."""

_FAMILY: Mapping[C, C] = {
    layer_class: whole[0] for whole in _WHOLE for layer_class in whole if layer_class is not C.ROUTER
}


def structure_faults(checkpoint: Checkpoint, layout: Layout, placements: Mapping[str, Placement]) -> Iterator[Problem]:
    """Everything that is missing, named twice, or of a shape that cannot be."""
    if not checkpoint.tensors:
        return
    yield from _architecture_faults(checkpoint.config)
    if not checkpoint.config.get("vision_config"):
        seeing = [name for name, placement in placements.items() if placement.layer_class is C.VISION]
        if seeing:
            what = f"{len(seeing)} tensors of a vision tower are stored, yet config.json has no vision_config"
            yield Problem(seeing[0], what, OTHER)
    yield from _name_faults(placements)
    yield from _top_faults(checkpoint, layout, placements)
    yield from _shape_faults(checkpoint, placements)
    layers = _layers(placements)
    if not layers:
        yield Problem("layers", "no tensor of any layer is stored", AGAIN)
    for place, names in layers.items():
        yield from _lonely_parts(place, names, layout, placements)
    yield from _unlike_siblings(checkpoint, layers, placements)


def _architecture_faults(config: Mapping[str, Any]) -> Iterator[Problem]:
    found = config.get("architectures")
    if found is None:
        return
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str) or not found[0].isidentifier():
        what = f"architectures is {str(found)[:80]}, not a list with the name of one class"
        yield Problem("config.json", what, "fetch config.json again: loaders choose the model's class by it")


def _name_faults(placements: Mapping[str, Placement]) -> Iterator[Problem]:
    for name in placements:
        if _PADDED.search(name):
            yield Problem(name, "a number with leading zeros: it would be the same module as the one without them")


def _top_faults(checkpoint: Checkpoint, layout: Layout, placements: Mapping[str, Placement]) -> Iterator[Problem]:
    present = {placement.rule for placement in placements.values()}
    for rule in layout.rules:
        if rule.required and rule not in present and not (rule.layer_class is C.LM_HEAD and layout.tied_head):
            name = rule.pattern.replace("\\.", ".").replace("(?:", "[").replace(")?", "]")
            what = "is not stored, and config.json does not tie it to the embedding"
            yield Problem(name, what if rule.layer_class is C.LM_HEAD else "is not stored", AGAIN)
    hidden = checkpoint.text_config.get("hidden_size")
    if type(hidden) is not int:
        return
    for name, placement in placements.items():
        shape = checkpoint.tensors[name].shape
        if placement.rule.required and shape and shape[-1] != hidden:
            what = f"is {list(shape)}, yet config.json says hidden_size {hidden}"
            yield Problem(name, what, OTHER)


def _shape_faults(checkpoint: Checkpoint, placements: Mapping[str, Placement]) -> Iterator[Problem]:
    hidden = checkpoint.text_config.get("hidden_size")
    for name, placement in placements.items():
        shape, rule = checkpoint.tensors[name].shape, placement.rule
        axis = _HIDDEN.get(placement.layer_class) if rule.linear and not rule.parts else None
        if 0 in shape:
            yield Problem(name, f"is {list(shape)}: it holds nothing", AGAIN)
        elif rule.linear and not rule.parts and len(shape) != 2:
            yield Problem(name, f"is {list(shape)}: the weight of a Linear has two dimensions", OTHER)
        elif axis is None or type(hidden) is not int or (axis == 0 and rule.fused):
            continue
        elif shape[axis] not in (hidden, 2 * hidden):
            what = "columns" if axis else "rows"
            yield Problem(name, f"is {list(shape)}: its {what} are not hidden_size {hidden}", OTHER)


def _layers(placements: Mapping[str, Placement]) -> dict[tuple[str, int], dict[str, str]]:
    """Tensors by (path to the layers, number): name behind the number -> whole name; the decoder's alone."""
    found: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    for name, placement in placements.items():
        if placement.layer_class not in _OUTSIDE and (match := _LAYER.match(name)):
            found[match[1], int(match[2])][match[3]] = name
    return found


def _lonely_parts(
    place: tuple[str, int], names: Mapping[str, str], layout: Layout, placements: Mapping[str, Placement]
) -> Iterator[Problem]:
    present = {placements[name].layer_class for name in names.values()}
    for whole in _WHOLE:
        needed = [c for c in whole if c in layout.classes]
        if any(c in present and c is not C.ROUTER for c in needed):
            lost = [str(c) for c in needed if c not in present]
            if lost:
                have = ", ".join(str(c) for c in needed if c in present)
                yield Problem(f"{place[0]}.{place[1]}", f"holds {have} without {', '.join(lost)}", AGAIN)


def _unlike_siblings(
    checkpoint: Checkpoint, layers: Mapping[tuple[str, int], Mapping[str, str]], placements: Mapping[str, Placement]
) -> Iterator[Problem]:
    kinds: dict[tuple[Any, ...], list[tuple[str, int]]] = defaultdict(list)
    for place, names in layers.items():
        kinds[_kind(checkpoint, place, names, placements)].append(place)
    for places in kinds.values():
        placed = {rest: placements[name] for place in places for rest, name in layers[place].items()}
        # The parts of a fused module are compared with each other by the plan.
        whole = {rest for rest, placement in placed.items() if not _varies(placement) and not placement.rule.fused}
        for place in places:
            for rest in sorted(whole - layers[place].keys()):
                yield Problem(f"{place[0]}.{place[1]}.{rest}", "is missing, yet layers of the same kind have it", AGAIN)
        yield from _odd_shapes(checkpoint, places, layers, placements)


def _odd_shapes(
    checkpoint: Checkpoint,
    places: Sequence[tuple[str, int]],
    layers: Mapping[tuple[str, int], Mapping[str, str]],
    placements: Mapping[str, Placement],
) -> Iterator[Problem]:
    """Shapes that differ from those of most siblings: the same part of other layers, the other experts too."""
    siblings: dict[str, list[str]] = defaultdict(list)
    for place in places:
        for rest, name in layers[place].items():
            if not _varies(placements[name]):
                siblings[_NUMBER.sub("N", rest)].append(name)
    for names in siblings.values():
        shapes = Counter(checkpoint.tensors[name].shape for name in names)
        (usual, count), *others = shapes.most_common()
        if not others:
            continue
        like = next(name for name in names if checkpoint.tensors[name].shape == usual)
        for name in names:
            shape = checkpoint.tensors[name].shape
            if shape != usual or count == others[0][1]:
                other = f"{like} is {list(usual)}" if shape != usual else f"others are {list(others[0][0])}"
                yield Problem(name, f"is {list(shape)}, yet {other}", OTHER)


def _varies(placement: Placement) -> bool:
    """Parts that some layers of a kind lack, or have in other sizes, by design."""
    return placement.rule.optional or placement.layer_class is C.ADAPTER


def _kind(
    checkpoint: Checkpoint, place: tuple[str, int], names: Mapping[str, str], placements: Mapping[str, Placement]
) -> tuple[Any, ...]:
    """What makes layers siblings: the parts in them, and what config.json says of each layer by itself."""
    parts: set[tuple[str, str]] = set()
    for rest, name in names.items():
        placement = placements[name]
        if rest.count(".") > 1:
            parts.add((rest.partition(".")[0], ""))
        if placement.rule.optional:
            parts.add((rest, "optional"))
        elif placement.rule.linear:
            parts.add((rest.partition(".")[0], str(_FAMILY.get(placement.layer_class, placement.layer_class))))
    config, number = checkpoint.text_config, place[1]
    lists = (config.get(key) for key in ("layer_types", "intermediate_size", "layers_block_type"))
    said = tuple(str(value[number]) for value in lists if isinstance(value, list) and number < len(value))
    return place[0], frozenset(parts), said
