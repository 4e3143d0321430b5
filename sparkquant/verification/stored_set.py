"""Is exactly what should be stored stored? By the plan where there is one, and by the declared schemes always."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from sparkquant.checkpoint import TensorHeader
from sparkquant.errors import CheckpointError
from sparkquant.formats.stored import SCALE_DTYPES, StoredModule, StoredScheme
from sparkquant.layers import LayerClass
from sparkquant.parts import absent_experts, broken_layers, layer_types, shares_indexers
from sparkquant.report import Check
from sparkquant.schemes import OutputTensor
from sparkquant.verification.catalogue import finding, skipped
from sparkquant.verification.complete import check_required
from sparkquant.verification.planned import planned_headers
from sparkquant.verification.schemes_stored import readable_schemes
from sparkquant.verification.subject import PLAN, Subject

_SCALES = ("weight_scale", "weight_scale_inv", "scales", "input_scale")
_LAYER = re.compile(r"(.*?\blayers)\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.*\bexperts)\.(\d{1,6})\.(.+)")


@dataclass
class _Faults:
    missing: set[str] = field(default_factory=set)
    extra: set[str] = field(default_factory=set)
    dtype: dict[str, str] = field(default_factory=dict)
    shape: dict[str, str] = field(default_factory=dict)
    wide: set[str] = field(default_factory=set)


def check_stored_set(subject: Subject) -> Iterator[Check]:
    """tensors.* and plan.*"""
    faults = _Faults()
    plan = subject.plan
    if isinstance(plan, CheckpointError):
        yield finding("plan.readable", plan.what)
        yield from skipped("the plan cannot be read", "plan.source")
    elif plan is None:
        yield from skipped("the folder has no sparkquant/plan.json", "plan.readable", "plan.source")
    else:
        _by_plan(subject, faults)
        headers = planned_headers(subject.path / PLAN)
        if subject.source is not None and headers != subject.source.header_digest:
            yield finding("plan.source", "the plan was made for another checkpoint than the source given", [PLAN])
    _by_schemes(subject, faults)
    _biases(subject, faults)
    yield from _reported(faults)
    order = list(_orders(subject))
    if order:
        what = "an activation order is stored; newer engines refuse it"
        yield finding("tensors.g_idx", what, order, warns=subject.reads_orders)
    yield from _unknown(subject)
    yield from _layers(subject)
    yield from check_required(subject)


def _orders(subject: Subject) -> Iterator[str]:
    """Stored activation orders; GPTQ files may hold the plain one, whose values scales.order looks at."""
    for name, module in subject.modules.items():
        scheme = subject.schemes.get(name)
        if scheme is None or not scheme.storage.by_columns:
            yield from (module.tensors[suffix].name for suffix in ("weight_g_idx", "g_idx") if suffix in module.tensors)


def _reported(faults: _Faults) -> Iterator[Check]:
    if faults.missing:
        yield finding("tensors.missing", "needed but not stored: loads as uninitialised memory", sorted(faults.missing))
    if faults.extra:
        yield finding("tensors.extra", "stored although nothing needs it", sorted(faults.extra))
    if faults.dtype:
        name, what = min(faults.dtype.items())
        yield finding("tensors.dtype", f"{name}: {what}", sorted(faults.dtype))
    if faults.shape:
        name, what = min(faults.shape.items())
        yield finding("tensors.shape", f"{name}: {what}", sorted(faults.shape))
    if faults.wide:
        yield finding("tensors.scale_dtype", "scales are stored wider than the engine keeps them", sorted(faults.wide))


def _by_plan(subject: Subject, faults: _Faults) -> None:
    stored, plan = subject.checkpoint.tensors, subject.plan
    assert isinstance(plan, dict)
    faults.missing |= plan.keys() - stored.keys()
    faults.extra |= stored.keys() - plan.keys()
    for name in plan.keys() & stored.keys():
        _compare(stored[name], (plan[name].dtype,), (plan[name].shape,), faults)


def _compare(
    header: TensorHeader, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], faults: _Faults
) -> None:
    if header.dtype not in dtypes:
        faults.dtype[header.name] = f"is {header.dtype}, not {' or '.join(dtypes)}"
    if header.shape not in shapes:
        faults.shape[header.name] = f"is {list(header.shape)}, not {list(shapes[0])}"


def _by_schemes(subject: Subject, faults: _Faults) -> None:
    """What each module's declared scheme needs; modules without a declaration are reported by config.*."""
    for name, scheme in readable_schemes(subject).items():
        _module(subject.modules[name], scheme, faults)


def _biases(subject: Subject, faults: _Faults) -> None:
    """The bias of a quantized Linear is as long as its rows."""
    for name, scheme in readable_schemes(subject).items():
        bias = subject.modules.get(f"{name}.bias")
        header = bias.tensors.get("") if bias is not None else None
        shape = scheme.shape_of(subject.modules[name].tensors)
        if header is not None and shape is not None and header.shape != shape[:1]:
            faults.shape.setdefault(header.name, f"is {list(header.shape)}, not {list(shape[:1])}")


def _module(module: StoredModule, scheme: StoredScheme, faults: _Faults) -> None:
    shape = scheme.shape_of(module.tensors)
    needed = {t.name: t for t in scheme.outputs(shape or (128, 128))}
    optional = {"weight_g_idx", "g_idx"}
    faults.missing |= {f"{module.name}.{suffix}" for suffix in needed.keys() - module.tensors.keys()}
    faults.extra |= {module.tensors[suffix].name for suffix in module.tensors.keys() - needed.keys() - optional}
    for suffix in needed.keys() & module.tensors.keys():
        header = module.tensors[suffix]
        dtypes = _dtypes(needed[suffix], scheme)
        if (
            header.dtype == "F32"
            and "F32" in dtypes
            and suffix in ("weight_scale", "scales")
            and scheme.scheme.is_integer
        ):
            faults.wide.add(header.name)
        shapes = _shapes(needed[suffix]) if shape is not None else (header.shape,)
        _compare(header, dtypes, shapes, faults)
    codes = module.tensors.get(scheme.codes)
    if shape is None and codes is not None:
        faults.shape[codes.name] = "is no matrix"
    elif shape is not None and (reason := scheme.scheme.problem(shape)):
        faults.shape.setdefault(codes.name if codes else module.name, reason)


def _dtypes(tensor: OutputTensor, scheme: StoredScheme) -> tuple[str, ...]:
    if tensor.name == "weight_scale_inv":
        return (*SCALE_DTYPES, "F8_E8M0")
    if tensor.name in _SCALES and scheme.scheme.name != "nvfp4a16":
        return SCALE_DTYPES
    return (tensor.dtype,)


def _shapes(tensor: OutputTensor) -> tuple[tuple[int, ...], ...]:
    """Producers write single numbers as [1] or [], and one scale a row as [N] or [N, 1]."""
    if tensor.shape == (1,):
        return (tensor.shape, ())
    return (tensor.shape, (*tensor.shape, 1)) if len(tensor.shape) == 1 else (tensor.shape,)


def _unknown(subject: Subject) -> Iterator[Check]:
    if subject.layout is None:
        model_type = str(subject.config.get("model_type"))[:80]
        yield from skipped(f"no layout knows model_type {model_type!r}", "tensors.unknown")
        return
    names = [
        name
        for name in subject.modules
        if subject.place(name) is None and not (subject.declared and subject.declared.kv_cache and _is_kv_scale(name))
    ]
    if names:
        yield finding("tensors.unknown", f"the layout {subject.layout.family} knows no such tensor", names)


def _is_kv_scale(name: str) -> bool:
    return name.endswith((".k_scale", ".v_scale"))


def _layers(subject: Subject) -> Iterator[Check]:
    """Layers of one type hold the same modules, and every expert is there."""
    layers = _by_layer(subject)
    missing: list[str] = []
    beyond: list[str] = []
    if shares_indexers(subject.checkpoint.text_config):
        for found in layers.values():
            for leaves in found.values():
                leaves -= {leaf for leaf in leaves if ".indexer." in leaf}
    for (_, region), members in _kinds(subject, layers).items():
        counts = Counter(leaf for index in members for leaf in layers[region][index])
        usual = {leaf for leaf, count in counts.items() if 2 * count > len(members)} or set(counts)
        missing += [f"{region}.{i}.{leaf}" for i in members for leaf in sorted(usual - layers[region][i])]
    number = subject.checkpoint.text_config.get("num_hidden_layers")
    for region, found in layers.items():
        if type(number) is int and 0 < number < 10_000 and _is_decoder(region):
            missing += [f"{region}.{index}" for index in range(number) if index not in found]
            behind = [index for index in found if index >= number]
            beyond += [f"{region}.{i}" for i in behind if not _is_draft(subject, f"{region}.{i}", found[i])]
    missing += absent_experts(_counted_experts(subject), subject.modules)
    if subject.layout is not None:
        broken = broken_layers(subject.layout, subject.checkpoint.text_config, subject.placements)
        missing += [place for place, _ in broken if place not in missing]
    if beyond:
        kept = [name for name in beyond if any(module.startswith(f"{name}.") for module in subject.source_modules)]
        what = "stored behind the last layer that config.json counts: the engine finds no place for them"
        yield finding("tensors.layers", what, beyond, inherited=len(kept) == len(beyond))
    if missing:
        kept = [name for name in missing if any(module.startswith(name) for module in subject.source_modules)]
        inherited = subject.source is not None and not kept
        what = "absent, though config.json or other layers of the type have it"
        yield finding("tensors.layers", what, missing, inherited=inherited)


def _is_draft(subject: Subject, layer: str, leaves: Iterable[str]) -> bool:
    """Whether a layer belongs to the draft head; of families that are not known, a layer behind the last may."""
    return subject.layout is None or any(subject.class_of(f"{layer}.{leaf}") is LayerClass.MTP for leaf in leaves)


_OUTSIDE = (".visual", ".encoder", "vision_tower", "audio_tower")
"""Towers, whose layers are counted apart."""


def _is_decoder(region: str) -> bool:
    return not region.startswith("mtp") and not any(part in region for part in _OUTSIDE)


_Layers = dict[str, dict[int, set[str]]]


def _by_layer(subject: Subject) -> _Layers:
    """Leaves by layer; all experts of a layer look like the first."""
    layers: _Layers = defaultdict(lambda: defaultdict(set))
    for module in subject.modules:
        match = _LAYER.fullmatch(module)
        if match is None or not _is_decoder(match[1]):
            continue
        expert = _EXPERT.fullmatch(match[3])
        leaf = match[3] if expert is None else f"{expert[1]}.0.{expert[3]}"
        layers[match[1]][int(match[2])].add(leaf)
    return layers


_RECURRENT = re.compile(r"(?:.*\.)?(?:linear_attn|A_log|conv_?1d|[qkv]_conv1d|conv|rg_lru)(?:\..*)?")
_ATTENTION = re.compile(r"(?:.*\.)?(?:q_proj|qkv_proj|kv_a_proj_with_mqa|q_a_proj)")


def _kinds(subject: Subject, layers: Mapping[str, Mapping[int, set[str]]]) -> dict[tuple[str, str], list[int]]:
    """Layers that must hold the same: by their kind in config.json, else by the kind of mixer that they hold."""
    text = subject.checkpoint.text_config
    number, types = text.get("num_hidden_layers"), layer_types(text)
    shared = text.get("num_kv_shared_layers")
    own_keys = number - shared if type(number) is int and type(shared) is int else None
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for region, found in layers.items():
        for index, leaves in found.items():
            mixer = f"{_any(_RECURRENT, leaves)} {_any(_ATTENTION, leaves)}"
            if index < len(types):
                mixer = str(types[index])
            routed = any(leaf.endswith(("mlp.gate", "mixer.gate")) or "experts." in leaf for leaf in leaves)
            borrowed = own_keys is not None and index >= own_keys  # keys and values of an earlier layer
            # Zamba2 stores a shared block once, and the own part of the layers that run it one level deeper.
            whole_block = [any(leaf.startswith(part) for leaf in leaves) for part in ("shared_transformer.", "mamba_d")]
            kinds[(f"{mixer} {routed} {borrowed} {whole_block}", region)].append(index)
    return kinds


def _any(pattern: re.Pattern[str], leaves: Iterable[str]) -> bool:
    return any(pattern.fullmatch(leaf) for leaf in leaves)


def _counted_experts(subject: Subject) -> int:
    """How many experts config.json counts; 0 when it does not say."""
    if subject.layout is not None:
        return subject.layout.experts[0]
    text = subject.checkpoint.text_config
    return next((text[key] for key in ("num_experts", "n_routed_experts") if type(text.get(key)) is int), 0)
