"""Where each stored module comes from in the source, and whether the two sets fit: header level."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sparkquant.checkpoint import Checkpoint, TensorHeader
from sparkquant.formats.stored import StoredModule, StoredScheme, modules_of
from sparkquant.layers import Layout
from sparkquant.report import Check
from sparkquant.schemes import DTYPE_BYTES
from sparkquant.verification.catalogue import finding
from sparkquant.verification.schemes_stored import readable_schemes
from sparkquant.verification.subject import Subject


@dataclass(frozen=True, slots=True)
class Origin:
    """The part of a source tensor that a stored module holds; `start` is an absolute offset in its shard, in bytes."""

    header: TensorHeader
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.header.dtype]


def origins(source: Checkpoint, layout: Layout | None) -> dict[str, Origin]:
    """By module name, as it would be stored: whole tensors, and the experts of fused ones."""
    found: dict[str, Origin] = {}
    for module, tensors in modules_of(source.tensors).items():
        for suffix, header in tensors.items():
            found[module if suffix in ("", "weight") else header.name] = Origin(header, header.shape, header.start)
            rule = layout.rule_of(header.name) if layout is not None else None
            if rule is not None and rule.parts:
                found.update(_experts(layout, header, rule.parts))
    return found


def _experts(layout: Layout | None, header: TensorHeader, parts: tuple[str, ...]) -> Iterator[tuple[str, Origin]]:
    if len(header.shape) != 3 or header.shape[1] % len(parts) or header.shape[0] > 100_000:
        return
    experts, rows, columns = header.shape
    shape = (rows // len(parts), columns)
    size = math.prod(shape) * DTYPE_BYTES[header.dtype]
    placement = layout.place(header.name) if layout is not None else None
    parent = (header.name if placement is None else placement.module).rpartition(".")[0]
    for expert in range(experts):
        for index, part in enumerate(parts):
            start = header.start + (expert * len(parts) + index) * size
            yield f"{parent}.{expert}.{part}", Origin(header, shape, start)


def plain_header(module: StoredModule) -> TensorHeader | None:
    """The stored weight of a module that is not quantized."""
    return None if module.is_quantized else module.tensors.get("weight", module.tensors.get(""))


def check_origins(subject: Subject) -> Iterator[Check]:
    """source.missing, source.extra, source.shape"""
    if subject.source is None:
        return
    known = origins(subject.source, subject.layout)
    extra = [name for name in subject.modules if name not in known]
    if extra:
        yield finding("source.extra", "the source has no such tensor", extra)
    missing = [origin.header.name for name, origin in known.items() if not _is_held(name, origin, subject, known)]
    if missing:
        yield finding("source.missing", "tensors of the source are lost", list(dict.fromkeys(missing)))
    unlike = dict(_unlike(subject, known))
    if unlike:
        name, what = next(iter(unlike.items()))
        yield finding("source.shape", f"{name}: {what}", unlike)


def _is_held(name: str, origin: Origin, subject: Subject, known: dict[str, Origin]) -> bool:
    """A tensor is held by its own module; a fused expert tensor is held whole, or else by every expert's part."""
    if name in subject.modules:
        return True
    whole = origin.header.name.removesuffix(".weight")
    if name != whole:
        return whole in subject.modules
    rule = subject.layout.rule_of(origin.header.name) if subject.layout is not None else None
    if rule is None or not rule.parts:
        return False
    parts = [part for part, _ in _experts(subject.layout, origin.header, rule.parts)]
    return bool(parts) and all(part in subject.modules and part in known for part in parts)


def _unlike(subject: Subject, known: dict[str, Origin]) -> Iterator[tuple[str, str]]:
    schemes = readable_schemes(subject)
    for name, module in subject.modules.items():
        origin = known.get(name)
        if origin is None:
            continue
        plain = plain_header(module)
        if plain is not None:
            if (plain.dtype, plain.shape) != (origin.header.dtype, origin.shape):
                source = f"{origin.header.dtype} {list(origin.shape)}"
                yield plain.name, f"is {plain.dtype} {list(plain.shape)}, the source has {source}"
        elif (shape := _quantized_shape(module, schemes.get(name))) not in (None, origin.shape):
            yield name, f"stands for {list(shape or ())}, the source has {list(origin.shape)}"


def _quantized_shape(module: StoredModule, scheme: StoredScheme | None) -> tuple[int, ...] | None:
    return None if scheme is None else scheme.shape_of(module.tensors)
