"""The quantized modules of a checkpoint as loads of the engine: class, scheme, size, what is fused."""

from __future__ import annotations

from collections.abc import Iterator

from sparkquant.engine.kernels import Form
from sparkquant.engine.routing import Load
from sparkquant.formats.declaration import ACTORDER
from sparkquant.verification.schemes_stored import readable_schemes
from sparkquant.verification.subject import Subject


def checkpoint_loads(subject: Subject) -> Iterator[Load]:
    """One load for every engine module whose stored tensors and declared scheme fit each other."""
    schemes = readable_schemes(subject)
    engine_names = {member: module for module in subject.engine_modules for member in module.members}
    groups: dict[str, list[str]] = {}
    for name in schemes:
        placement = subject.place(name)
        group = placement.group if placement is not None else ""
        if not group and name in engine_names:
            group = engine_names[name].name
        groups.setdefault(group or name, []).append(name)
    for group, members in groups.items():
        load = _load(subject, group, members)
        if load is not None:
            yield load


def _load(subject: Subject, group: str, members: list[str]) -> Load | None:
    first = members[0]
    scheme = subject.schemes[first]
    is_moe = group.endswith("experts")
    if is_moe:  # one expert stands for all: gate first, whose rows are the inner size
        first = next((name for name in members if name.endswith(("gate_proj", "w1", "up_proj"))), first)
        scheme, members = subject.schemes[first], [first]
    shapes = [subject.schemes[name].shape_of(subject.modules[name].tensors) for name in members]
    parts = tuple(shape for shape in shapes if shape is not None and min(shape) > 0)
    if len(parts) < len(members):
        return None  # tensors.shape names it
    placement = subject.place(first)
    plain = ""
    if placement is not None and subject.serving.engine is not None:
        plain = placement.rule.plain_in(subject.version)
    layer_class = subject.class_of(first)
    label = group.rpartition(".")[2] if layer_class is None else str(layer_class)
    return Load(
        name=group,
        label="experts" if is_moe else label,
        scheme=scheme.scheme,
        scheme_label=scheme.label,
        parts=parts,
        row_parallel=placement.rule.row_parallel if placement is not None else group.endswith(("down_proj", "o_proj")),
        is_moe=is_moe,
        form=Form(str(scheme.storage), scheme.inputs, scheme.per_tensor, _ordered(subject, first)),
        plain=plain,
        groups=placement.rule.groups if placement is not None else 0,
        activation=subject.layout.activation if subject.layout is not None else "",
    )


def _ordered(subject: Subject, module: str) -> bool:
    """Whether the config declares an activation order and the module stores one."""
    declared = subject.declared is not None and any(fault.kind == ACTORDER for fault in subject.declared.faults)
    return declared and not {"g_idx", "weight_g_idx"}.isdisjoint(subject.modules[module].tensors)
