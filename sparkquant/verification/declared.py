"""config.json against the tensors: what is declared is stored, what is stored is declared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from sparkquant.engine.rules import Ignored
from sparkquant.errors import CheckpointError
from sparkquant.formats.declaration import ACTORDER, FORMAT, MALFORMED, UNSUPPORTED, Fault
from sparkquant.layers import PROTECTED
from sparkquant.layouts import layout_for
from sparkquant.parts import short_types
from sparkquant.report import Check
from sparkquant.sizes import misstated, size_faults, unstated
from sparkquant.verification.catalogue import finding, skipped
from sparkquant.verification.origins import plain_header
from sparkquant.verification.planned import planned_schemes
from sparkquant.verification.resolution import resolve
from sparkquant.verification.schemes_stored import is_other_kind, readable_schemes
from sparkquant.verification.subject import PLAN, Subject

_FAULT_IDS = {
    MALFORMED: "config.malformed",
    UNSUPPORTED: "config.unsupported",
    FORMAT: "config.format",
    ACTORDER: "config.actorder",
}


def check_config(subject: Subject) -> Iterator[Check]:
    """config.* except architectures."""
    yield from _dtype(subject)
    yield from _sizes(subject)
    inherited = set(_nonfinite(subject.source.config)) if subject.source is not None else set()
    places = [place for place in _nonfinite(subject.config) if place not in inherited]
    if places:
        yield finding("config.nonfinite", "NaN or infinity in config.json: strict readers refuse the file", places)
    declared = subject.declared
    if declared is None:
        ids = ("malformed", "unsupported", "format", "actorder", "plan", "kv_cache", "absent", "scheme")
        yield from skipped("config.json has no quantization_config", *(f"config.{id}" for id in ids))
        quantized = [name for name, module in subject.modules.items() if module.is_quantized]
        if quantized:
            yield finding("config.undeclared", "stored quantized, but there is no quantization_config", quantized)
        else:
            yield finding("config.plain", "nothing here is quantized, and no quantization_config says that it were")
        return
    yield from _faults(subject)
    yield from _as_planned(subject)
    if declared.kv_cache:
        yield finding("config.kv_cache", "engines run an FP8 KV cache at scale 1.0 here, whatever is stored")
    yield from _both_ways(subject)


def _dtype(subject: Subject) -> Iterator[Check]:
    if subject.checkpoint.float16:
        yield finding("config.float16", "activations overflow float16 to NaN or `!!!!`: use bfloat16")


def _sizes(subject: Subject) -> Iterator[Check]:
    if subject.layout is None:
        what = f"no layout knows model_type {str(subject.config.get('model_type'))[:80]!r}: much is not judged"
        yield finding("config.family", what)
        yield from skipped("no layout knows this model_type", "config.sizes")
        return
    same = subject.source is not None and subject.source.text_config == subject.checkpoint.text_config
    if fault := misstated(subject.config) or short_types(subject.checkpoint.text_config):
        yield finding("config.sizes", fault, inherited=same)
    elif gap := unstated(subject.config):
        yield finding("config.sizes", f"config.json {gap}", warns=True)
    shapes: dict[str, tuple[int, ...]] = {}
    schemes = readable_schemes(subject)
    for name, module in subject.modules.items():
        plain, scheme = plain_header(module), schemes.get(name)
        shape = plain.shape if plain is not None else scheme.shape_of(module.tensors) if scheme is not None else None
        if shape is not None and name in subject.placements:
            shapes[name] = shape
    faults = list(size_faults(subject.layout, subject.placements, shapes))
    if faults:
        names = [fault.where for fault in faults]
        inherited = subject.source is not None and _of_source(subject, {name: shapes[name] for name in names})
        yield finding("config.sizes", f"{names[0]} {faults[0].what}", names, inherited=inherited)


def _of_source(subject: Subject, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the source says the same and stores the same."""
    assert subject.source is not None
    assert subject.layout is not None
    try:
        if layout_for(subject.source.config).sizes != subject.layout.sizes:
            return False
    except CheckpointError:
        return False
    tensors = subject.source.tensors
    stored = {name: tensors.get(f"{name}.weight", tensors.get(name)) for name in shapes}
    return all(header is not None and header.shape == shapes[name] for name, header in stored.items())


def _nonfinite(config: Mapping[str, Any]) -> Iterator[str]:
    todo: list[tuple[str, Any]] = [("", config)]
    while todo:
        where, value = todo.pop()
        if isinstance(value, Mapping):
            todo += [(f"{where}.{key}".lstrip("."), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            todo += [(f"{where}[{index}]", inner) for index, inner in enumerate(value) if not isinstance(inner, str)]
        elif isinstance(value, float) and not math.isfinite(value):
            yield where


def _faults(subject: Subject) -> Iterator[Check]:
    assert subject.declared is not None
    faults = list(subject.declared.faults)
    block = subject.quantization
    if isinstance(block, Mapping) and "quant_method" not in block:
        faults.append(Fault(MALFORMED, "quant_method", "is absent"))
    for kind, id in _FAULT_IDS.items():
        of_kind = [fault for fault in faults if fault.kind == kind]
        if of_kind:
            older = kind == ACTORDER and subject.reads_orders
            what = f"{of_kind[0].where} {of_kind[0].what}" + (f" (vLLM {subject.version} reads it)" if older else "")
            yield finding(id, what, [fault.where for fault in of_kind], warns=older)


def _as_planned(subject: Subject) -> Iterator[Check]:
    """The groups are the plan's: of activations no tensor tells."""
    assert subject.declared is not None
    if not isinstance(subject.plan, dict):
        yield from skipped("the folder has no readable sparkquant/plan.json", "config.plan")
        return
    try:
        schemes = planned_schemes(subject.path / PLAN)
    except CheckpointError as error:
        yield finding("config.plan", error.what)
        return
    planned = {(scheme.label, "dynamic" if scheme.rounds_inputs else "none") for scheme in schemes}
    declared = {(g.scheme.label, g.scheme.inputs) for g in subject.declared.groups if g.scheme is not None}
    wrong = sorted(planned ^ declared)
    if wrong and all(group.scheme is not None for group in subject.declared.groups):
        label, inputs = wrong[0]
        what = "declares" if wrong[0] in declared else "does not declare"
        yield finding("config.plan", f"quantization_config {what} {label} with activations {inputs}; the plan differs")


def _both_ways(subject: Subject) -> Iterator[Check]:
    """Stored quantized <=> declared, module by module."""
    absent: list[str] = []
    undeclared: list[str] = []
    engine_names: set[str] = set()
    for engine_module in subject.engine_modules:
        resolution = resolve(subject, engine_module, subject.version)
        engine_names.update(engine_module.members)
        if resolution.ignored is Ignored.PARTIAL:
            continue  # rules.partial_ignore names it
        for member in engine_module.members:
            quantized = subject.modules[member].is_quantized
            if quantized and resolution.group is None:
                undeclared.append(member)
            elif not quantized and resolution.group is not None and subject.class_of(member) not in PROTECTED:
                absent.append(member)
    outside = [n for n, m in subject.modules.items() if m.is_quantized and n not in engine_names]
    undeclared += [name for name in outside if subject.class_of(name) not in PROTECTED]
    if absent:
        yield finding("config.absent", "declared quantized, but plain weights are stored", absent)
    if undeclared:
        yield finding("config.undeclared", "stored quantized, but ignored or reached by no target", undeclared)
    others = [
        name
        for name, scheme in subject.schemes.items()
        if subject.modules[name].is_quantized and is_other_kind(subject.modules[name], scheme)
    ]
    if others:
        label = subject.schemes[others[0]].label
        yield finding("config.scheme", f"declared {label}, but stored otherwise", others)
