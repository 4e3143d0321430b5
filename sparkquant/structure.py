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
from sparkquant.completeness import incomplete_draft, incomplete_tower
from sparkquant.errors import Problem
from sparkquant.formats.stored import modules_of
from sparkquant.layers import LayerClass as C
from sparkquant.layers import Layout, Placement
from sparkquant.layouts import families_of
from sparkquant.parts import (
    TYPES,
    absent_companions,
    absent_experts,
    absent_parts,
    broken_layers,
    shares_indexers,
    short_types,
)
from sparkquant.sizes import misstated, size_faults

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

_NORMS_BY_MIXER = ("olmo_hybrid",)
"""Families whose layers with attention have other norms than those with a recurrence."""

_MIXERS = frozenset({C.ATTENTION_QKV, C.MLA_Q, C.LINEAR_ATTENTION_QKVZ, C.SSM_IN})

_FAMILY: Mapping[C, C] = {
    layer_class: whole[0] for whole in _WHOLE for layer_class in whole if layer_class is not C.ROUTER
}


def structure_faults(checkpoint: Checkpoint, layout: Layout, placements: Mapping[str, Placement]) -> Iterator[Problem]:
    """Everything that is missing, named twice, or of a shape that cannot be; one fault for each name."""
    told: set[str] = set()
    for problem in _faults(checkpoint, layout, placements) if checkpoint.tensors else ():
        if problem.where not in told or problem.where == "config.json":
            told.add(problem.where)
            yield problem


def _faults(checkpoint: Checkpoint, layout: Layout, placements: Mapping[str, Placement]) -> Iterator[Problem]:
    sees = any(placement.layer_class is C.VISION for placement in placements.values())
    yield from _architecture_faults(checkpoint.config, layout, sees=sees)
    if fault := misstated(checkpoint.config):
        yield Problem("config.json", fault, "fetch config.json again")
    if fault := short_types(checkpoint.text_config):
        yield Problem("config.json", fault, "fetch config.json again: layers without a kind are not built")
    if not checkpoint.config.get("vision_config"):
        seeing = [name for name, placement in placements.items() if placement.layer_class is C.VISION]
        if seeing:
            what = f"{len(seeing)} tensors of a vision tower are stored, yet config.json has no vision_config"
            yield Problem(seeing[0], what, OTHER)
    yield from _name_faults(placements)
    yield from _top_faults(checkpoint, layout, placements)
    yield from _shape_faults(checkpoint, placements)
    shapes = {name: header.shape for name, header in checkpoint.tensors.items()}
    yield from size_faults(layout, placements, shapes)
    yield from _incomplete_regions(checkpoint, layout, placements)
    layers = _layers(placements)
    if not layers:
        yield Problem("layers", "no tensor of any layer is stored", AGAIN)
    yield from _missing(checkpoint, layout, placements)
    for place, names in layers.items():
        yield from _lonely_parts(place, names, layout, placements)
    yield from _unlike_siblings(checkpoint, layout, layers, placements)


def _missing(checkpoint: Checkpoint, layout: Layout, placements: Mapping[str, Placement]) -> Iterator[Problem]:
    """What config.json, the family or the other parts of a module demand."""
    text = checkpoint.text_config
    yield from (Problem(where, what, AGAIN) for where, what in broken_layers(layout, text, placements))
    what = "is missing, yet config.json counts it or other experts have it"
    yield from (Problem(name, what, AGAIN) for name in absent_experts(layout.experts[0], placements))
    what = "is missing, yet the other parts of its module are stored"
    yield from (Problem(name, what, AGAIN) for name in absent_parts(layout, placements))
    what = "is missing, yet config.json or tensors that need it have it"
    yield from (Problem(name, what, AGAIN) for name in absent_companions(layout, text, placements))


def _architecture_faults(config: Mapping[str, Any], layout: Layout, *, sees: bool) -> Iterator[Problem]:
    if config.get("architectures") is not None and (fault := architecture_fault(config, layout, sees=sees)):
        fit = [name for name in layout.architectures if not (sees and name.endswith("ForCausalLM"))]
        yield Problem("config.json", fault, f"restore the class of the model, {' or '.join(fit)}")


def architecture_fault(config: Mapping[str, Any], layout: Layout, *, sees: bool) -> str:
    """Why the class that a config names does not load this family with its tower (`sees`); "" when it does.

    A checkpoint that brings the code of its class is believed.
    """
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str) or not found[0].isidentifier():
        return f"architectures is {str(found)[:80]}, not a list with the name of one class"
    name = found[0]
    if sees and name.endswith("ForCausalLM") and name in layout.architectures:
        return f"architectures names {name}, a text-only class, yet vision tensors are stored"
    if name in layout.architectures or isinstance(config.get("auto_map"), Mapping):
        return ""
    others = [family for family in families_of(name) if family != layout.family]
    owner = f"a class of {', '.join(others)}" if others else "no class that loads this family"
    return f"architectures names {name[:80]}, {owner}, yet model_type is {str(config.get('model_type'))[:80]}"


def _incomplete_regions(
    checkpoint: Checkpoint, layout: Layout, placements: Mapping[str, Placement]
) -> Iterator[Problem]:
    """Draft head and vision tower: all of it or nothing."""
    if not any(placement.layer_class in (C.MTP, C.VISION) for placement in placements.values()):
        return
    modules = modules_of(checkpoint.tensors)
    of_class: dict[C, set[str]] = defaultdict(set)
    for module, tensors in modules.items():
        of_class[placements[next(iter(tensors.values())).name].layer_class].add(module)
    draft = incomplete_draft(layout, checkpoint.text_config, modules, of_class[C.MTP])
    what = "is missing in the draft head, of which other parts are stored"
    yield from (Problem(name, what, AGAIN) for name in sorted(draft))
    tower = checkpoint.config.get("vision_config")
    lost = incomplete_tower(layout, tower if isinstance(tower, Mapping) else {}, of_class[C.VISION])
    if of_class[C.VISION]:
        what = "is missing in the vision tower, of which other parts are stored"
        yield from (Problem(name, what, AGAIN) for name in lost)


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
    checkpoint: Checkpoint,
    layout: Layout,
    layers: Mapping[tuple[str, int], Mapping[str, str]],
    placements: Mapping[str, Placement],
) -> Iterator[Problem]:
    """What some layers lack: components (`mlp`) that others of the kind have, and parts that like components have."""
    kinds: dict[tuple[Any, ...], list[tuple[str, int]]] = defaultdict(list)
    alike: dict[tuple[Any, ...], list[tuple[str, dict[str, str]]]] = defaultdict(list)
    components: dict[tuple[str, int], set[str]] = {}
    sharing = shares_indexers(checkpoint.text_config)
    for place, names in layers.items():
        parts = _components(names)
        hybrid = "mamba_decoder" in parts  # Zamba2 keeps a layer's own part one level deeper where a shared block runs
        said = (*_said(checkpoint, place[1]), str(hybrid))
        components[place] = {
            part
            for part, inner in parts.items()
            if part and not all(map(_varies, _placed(inner, placements))) and not (sharing and "indexer" in part)
        }
        kinds[(place[0], _made_of(names, placements), said)].append(place)
        for part, inner in parts.items():
            made: Any = _made_of(inner if part else names, placements)
            made = made if part else (made & _MIXERS if layout.family in _NORMS_BY_MIXER else hybrid)
            kind = place[0], _NUMBER.sub("N", part), made
            alike[kind].append((f"{place[0]}.{place[1]}.{part}".rstrip("."), inner))
    for places in kinds.values():
        every = set().union(*(components[place] for place in places))
        for place in places:
            for part in sorted(every - components[place]):
                yield Problem(f"{place[0]}.{place[1]}.{part}", "is missing, yet layers of the same kind have it", AGAIN)
        yield from _odd_shapes(checkpoint, places, layers, placements)
    for found in alike.values():
        whole = {rest for _, inner in found for rest, name in inner.items() if not _varies(placements[name])}
        for where, inner in found:
            for rest in sorted(whole - inner.keys()):
                yield Problem(f"{where}.{rest}", "is missing, yet layers of the same kind have it", AGAIN)


def _components(names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """`self_attn` -> its tensors; "" for what lies directly below the layer."""
    found: dict[str, dict[str, str]] = defaultdict(dict, {"": {}})
    for rest, name in names.items():
        module = rest.removesuffix(".weight").removesuffix(".bias")
        part = module.rpartition(".")[0]
        found[part][rest.removeprefix(f"{part}.")] = name
    return found


def _placed(names: Mapping[str, str], placements: Mapping[str, Placement]) -> Iterator[Placement]:
    return (placements[name] for name in names.values())


def _made_of(names: Mapping[str, str], placements: Mapping[str, Placement]) -> frozenset[str]:
    """Classes of the matrices, each by the first of its part, and the names of what some layers lack by design."""
    found: set[str] = set()
    for rest, name in names.items():
        placement = placements[name]
        if placement.rule.optional:
            found.add(rest)
        elif placement.rule.linear:
            found.add(_FAMILY.get(placement.layer_class, placement.layer_class))
    return frozenset(found)


def _said(checkpoint: Checkpoint, number: int) -> tuple[str, ...]:
    """What config.json says of one layer by itself."""
    config = checkpoint.text_config
    lists = (config.get(key) for key in (*TYPES, "intermediate_size"))
    return tuple(str(value[number]) for value in lists if isinstance(value, list | str) and number < len(value))


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
    return placement.rule.optional
