"""Values of scales: one wrong scale is one wrong row, and no engine complains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkquant.checkpoint import TensorHeader
from sparkquant.formats.declaration import ACTORDER
from sparkquant.formats.stored import StoredModule, StoredScheme
from sparkquant.report import Check
from sparkquant.schemes import FP8_BLOCK, NVFP4_BLOCK
from sparkquant.verification.catalogue import finding
from sparkquant.verification.columns import loses_columns, plain_order
from sparkquant.verification.payload import PIECE_BYTES, READABLE, Floats, Payload, decode, matrix_shape
from sparkquant.verification.schemes_stored import readable_schemes
from sparkquant.verification.subject import Subject

SCALES = ("weight_scale", "weight_global_scale", "input_scale", "input_global_scale", "weight_scale_2",
          "weight_scale_inv", "scales")  # fmt: skip
GLOBAL = ("weight_global_scale", "input_global_scale", "weight_scale_2", "input_scale")
TINY = float(np.finfo(np.float32).tiny)


@dataclass
class _Faults:
    nonfinite: list[str] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    negative: list[str] = field(default_factory=list)
    denormal: list[str] = field(default_factory=list)
    flushed: dict[str, int] = field(default_factory=dict)


def check_scales(subject: Subject, payload: Payload) -> Iterator[Check]:
    """scales.*"""
    faults = _Faults()
    schemes = readable_schemes(subject)
    for name, module in subject.modules.items():
        scheme = schemes.get(name)
        for suffix, header in module.tensors.items():
            if suffix in SCALES and header.dtype in READABLE and header.bytes:  # [2**46, 0] has rows without end
                with np.errstate(all="ignore"):  # signalling NaNs are what is looked for
                    _scale(payload, module, suffix, header, scheme, faults)
    if faults.nonfinite:
        yield finding("scales.finite", "scales are NaN or infinite", faults.nonfinite)
    if faults.zero:
        yield finding("scales.zero", "scales are zero where the stored weights are not", faults.zero)
    if faults.negative:
        yield finding("scales.sign", "scales are negative where the engine drops or forbids the sign", faults.negative)
    if faults.denormal:
        yield finding("scales.denormal", "scales are denormal: the reciprocal is infinite", faults.denormal)
    if faults.flushed:
        blocks = sum(faults.flushed.values())
        what = f"{blocks:,} blocks of 16 weights will be flushed to zero"
        yield finding("scales.flush", what, faults.flushed, measured=blocks, expected=0)
    yield from _global_scales(subject, payload)
    yield from _shape_values(subject, payload, schemes)
    yield from _orders(subject, payload, schemes)


def _scale(
    payload: Payload, module: StoredModule, suffix: str, header: TensorHeader, scheme: StoredScheme | None, out: _Faults
) -> None:
    is_int = scheme.scheme.is_integer if scheme is not None else _holds_integers(module)
    rows, columns = matrix_shape(header.shape)
    step = _rows_at_once(module, rows, columns)
    nonfinite = zero = negative = denormal = flushed = 0
    for first in range(0, rows, step):
        codes = payload.codes(header, first, first + step)
        found = _fp8_faults(codes) if header.dtype == "F8_E4M3" else _float_faults(decode(codes, header.dtype))
        nonfinite += found.nonfinite
        negative += found.negative if not is_int else 0
        denormal += found.denormal
        flushed += found.flushed
        if found.zero:
            values = decode(codes, header.dtype)
            zero += suffix in GLOBAL or _loses_weights(payload, module, scheme, values, first)
    for count, names in (
        (nonfinite, out.nonfinite), (zero, out.zero), (negative, out.negative), (denormal, out.denormal)
    ):  # fmt: skip
        if count:
            names.append(header.name)
    if flushed:
        out.flushed[header.name] = flushed


class _Counts(NamedTuple):
    nonfinite: int
    negative: int
    zero: int
    denormal: int
    flushed: int


def _float_faults(values: Floats) -> _Counts:
    size = np.abs(values)
    count = np.count_nonzero
    zero = values.size - count(values)
    infinite = values.size - count(np.isfinite(values))
    return _Counts(int(infinite), int(count(values < 0)), int(zero), int(count((size > 0) & (size < TINY))), 0)


def _fp8_faults(codes: NDArray[Any]) -> _Counts:
    """By their codes, which is quicker: 0x7f is NaN; below 8 are those under 2**-6, which Marlin's rescale flushes."""
    size = codes & np.uint8(0x7F)
    count = np.count_nonzero
    nan, zero = count(size == 0x7F), size.size - count(size)
    negative = count(codes > 0x80) - count(codes == 0xFF)
    return _Counts(int(nan), int(negative), int(zero), 0, int(count(size < 8) - zero))


def _holds_integers(module: StoredModule) -> bool:
    """Whether the codes are packed integers, whose scales have a sign, where no config says so."""
    codes = module.tensors.get("weight_packed", module.tensors.get("qweight"))
    return codes is not None and codes.dtype == "I32"


def _rows_at_once(module: StoredModule, rows: int, columns: int) -> int:
    """So many rows that neither their scales nor their codes are large."""
    codes = next((module.tensors[s] for s in ("weight_packed", "weight", "qweight") if s in module.tensors), None)
    per_row = max(4 * columns, codes.bytes // max(1, rows) if codes is not None else 0, 1)
    return max(1, PIECE_BYTES // per_row)


def _loses_weights(
    payload: Payload, module: StoredModule, scheme: StoredScheme | None, scales: Floats, first: int
) -> bool:
    """Whether some zero scale belongs to codes that are not all zero. Unknown layouts count as lost."""
    if scheme is None:
        return True
    kind = scheme.scheme
    codes = module.tensors.get(scheme.codes)
    if scheme.storage.by_columns:
        return loses_columns(payload, module, scheme, scales, first)
    if codes is None or len(codes.shape) != 2:
        return True
    block = FP8_BLOCK if kind.name == "fp8_block" else 1
    if scheme.per_tensor:
        return any((piece & 0x7F).any() for piece in payload.pieces(codes))
    last = min((first + len(scales)) * block, codes.shape[0])
    held = _nonzero(payload.codes(codes, first * block, last), scheme)
    width = {"fp8_block": FP8_BLOCK, "nvfp4a16": NVFP4_BLOCK}.get(kind.name, kind.group_size)
    width = held.shape[1] if width in (-1, 0) else width
    spread = np.repeat(np.repeat(scales == 0, block, axis=0), width, axis=1)
    rows, columns = min(len(held), len(spread)), min(held.shape[1], spread.shape[1])
    return bool((held[:rows, :columns] & spread[:rows, :columns]).any())


def _nonzero(codes: NDArray[Any], scheme: StoredScheme) -> NDArray[Any]:
    """Which weights [rows, K] have a code that is not zero: a matrix of booleans."""
    kind = scheme.scheme
    if not kind.is_integer and kind.name != "nvfp4a16":
        return (codes & 0x7F).astype(np.bool_)
    raw = codes.view(np.uint8).reshape(len(codes), -1)
    if kind.bits == 8:
        return (raw ^ 0x80).astype(np.bool_)
    nibbles = np.stack((raw & 15, raw >> 4), axis=-1).reshape(len(codes), -1)
    if kind.name == "nvfp4a16":
        return (nibbles & 7).astype(np.bool_)
    return (nibbles ^ (8 if kind.symmetric else nibbles[:, :1])).astype(np.bool_)


def _global_scales(subject: Subject, payload: Payload) -> Iterator[Check]:
    """Parts of one engine module share one NVFP4 global scale: the engine keeps the largest for all."""
    groups: dict[str, dict[bytes, list[str]]] = defaultdict(lambda: defaultdict(list))
    fused = {member: m.name for m in subject.engine_modules if not m.is_moe for member in m.members}
    for name, module in subject.modules.items():
        two_levels = "weight_scale_2" in module.tensors
        for suffix in ("weight_global_scale", "input_global_scale", "weight_scale_2", "input_scale"):
            header = module.tensors.get(suffix) if suffix != "input_scale" or two_levels else None
            if header is not None and 0 < header.bytes <= 8:
                placement = subject.place(name)
                group = placement.scale_group if placement and placement.scale_group else fused.get(name, name)
                value = payload.raw(header.shard, header.start, header.bytes)
                groups[f"{group} {suffix}"][value].append(header.name)
    unequal = [names[0] for values in groups.values() if len(values) > 1 for names in values.values()]
    if unequal:
        what = "global scales differ inside an engine module, which keeps one of them"
        yield finding("scales.global", what, unequal)


def _shape_values(subject: Subject, payload: Payload, schemes: dict[str, StoredScheme]) -> Iterator[Check]:
    wrong: list[str] = []
    for name, module in subject.modules.items():
        header, scheme = module.tensors.get("weight_shape"), schemes.get(name)
        shape = scheme.shape_of(module.tensors) if scheme is not None else None
        if header is None or header.dtype not in ("I64", "I32") or header.shape != (2,) or shape is None:
            continue
        stated = tuple(int(value) for value in payload.codes(header).reshape(-1))
        if stated != shape:
            wrong.append(header.name)
    if wrong:
        yield finding("scales.shape_value", "weight_shape states another shape than the codes have", wrong)


def _orders(subject: Subject, payload: Payload, schemes: dict[str, StoredScheme]) -> Iterator[Check]:
    """A GPTQ file may hold a g_idx that its config says is not used."""
    turned = [
        f"{name}.g_idx"
        for name, scheme in schemes.items()
        if scheme.storage.by_columns and not plain_order(payload, subject.modules[name], scheme)
    ]
    actorder = any(fault.kind == ACTORDER for fault in subject.declared.faults) if subject.declared else False
    if turned and not actorder:
        yield finding("scales.order", "inputs are in another order than the engine assumes (desc_act is off)", turned)
