"""Which scheme the config declares for each stored module, and whether its tensors are of that kind."""

from __future__ import annotations

from sparkquant.engine.rules import Ignored
from sparkquant.formats.stored import StoredModule, StoredScheme
from sparkquant.verification.resolution import named_group, resolve
from sparkquant.verification.subject import Subject

CODES = ("weight", "weight_packed", "qweight", "qzeros", "scales")
"""What only modules of some kind have: theirs is another kind when its own codes are absent."""


def declared_schemes(subject: Subject) -> dict[str, StoredScheme]:
    """By checkpoint module. A part of a fused module answers for itself here; rules.* compares the parts."""
    found: dict[str, StoredScheme] = {}
    if subject.declared is None:
        return found
    names = subject.declared.names
    for engine_module in subject.engine_modules:
        whole = resolve(subject, engine_module, subject.version)
        for member in engine_module.members:
            if names is not None:
                group = names.group_of(member) if whole.ignored is not Ignored.YES else None
            else:
                group = named_group(subject.engine.engine_name(member), subject) or whole.group
            if group is not None and group.scheme is not None:
                found[member] = group.scheme
    return found


def readable_schemes(subject: Subject) -> dict[str, StoredScheme]:
    """Of the declared schemes those whose tensors are of that kind: what values can be read with."""
    return {
        name: scheme
        for name, scheme in subject.schemes.items()
        if subject.modules[name].is_quantized and not is_other_kind(subject.modules[name], scheme)
    }


def is_other_kind(module: StoredModule, scheme: StoredScheme) -> bool:
    """Whether the stored codes cannot belong to the scheme at all: another name or another dtype."""
    header = module.tensors.get(scheme.codes)
    if header is None:
        own = {t.name for t in scheme.outputs((128, 128))}
        return any(suffix in module.tensors for suffix in CODES if suffix not in own)
    wanted = next(t.dtype for t in scheme.outputs((128, 128)) if t.name == scheme.codes)
    return header.dtype != wanted


def stored_bits(module: StoredModule, scheme: StoredScheme | None) -> int:
    """Bits of a quantized module's codes; 4 when only a declaration could say and there is none."""
    if scheme is not None and not is_other_kind(module, scheme):
        return scheme.scheme.bits
    codes = module.tensors.get("weight")
    return 8 if codes is not None and codes.dtype != "U8" else 4
