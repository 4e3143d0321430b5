"""The checks that read tensors: scales, kept bytes against the source, and with `deep` every stored value."""

from __future__ import annotations

from collections.abc import Iterator

from sparkquant.events import Advanced, Finished, Listener, Started
from sparkquant.formats.stored import StoredModule
from sparkquant.report import Check, Status
from sparkquant.verification.catalogue import CATALOGUE, MAX_NAMED, finding, skipped
from sparkquant.verification.origins import Origin, origins, plain_header
from sparkquant.verification.payload import PIECE_BYTES, Payload
from sparkquant.verification.scales import SCALES, check_scales
from sparkquant.verification.schemes_stored import readable_schemes
from sparkquant.verification.streaming import holds_nonfinite, stream
from sparkquant.verification.subject import Subject

PHASE = "verify"


def check_values(subject: Subject, *, deep: bool, listener: Listener) -> list[Check]:
    """scales.*, source.bytes and values.*"""
    found: list[Check] = []
    if deep:  # first, in the order of the files: what the other checks ask for is in memory then, if it fits
        found += _every_value(subject, listener)
    with Payload(subject.checkpoint) as payload:
        found += check_scales(subject, payload)
        if subject.source is not None:
            found += _kept_bytes(subject, payload, listener)
    if deep and subject.source is not None:
        found += _errors(subject, listener)
    return found


def _kept_bytes(subject: Subject, payload: Payload, listener: Listener) -> Iterator[Check]:
    assert subject.source is not None
    known = origins(subject.source, subject.layout)
    stored = [
        (header, known[name])
        for name, module in subject.modules.items()
        if (header := plain_header(module)) is not None and name in known and header.bytes == known[name].bytes
    ]
    kept = [(header, origin) for header, origin in stored if origin.header.name not in subject.overlaid]
    listener(Started(PHASE, sum(header.bytes for header, _ in kept)))
    unlike: list[str] = []
    with Payload(subject.source) as original:
        for header, origin in kept:
            computed = subject.source.computed.get(origin.header.name)
            if computed is not None:
                from sparkquant.verification.weight_error import bfloat16_bytes

                if payload.raw(header.shard, header.start, header.bytes) != bfloat16_bytes(computed):
                    unlike.append(header.name)
                listener(Advanced(PHASE, header.bytes, header.name))
                continue
            for offset in range(0, header.bytes, PIECE_BYTES):
                size = min(PIECE_BYTES, header.bytes - offset)
                mine = payload.raw(header.shard, header.start + offset, size)
                if mine != original.raw(origin.header.shard, origin.start + offset, size):
                    unlike.append(header.name)
                    break
            listener(Advanced(PHASE, header.bytes, header.name))
    listener(Finished(PHASE))
    live = _not_compared(len(stored) - len(kept))
    if unlike:
        yield finding("source.bytes", f"kept tensors differ from the source{live}", unlike)
    elif live:
        yield Check("source.bytes", Status.PASS, f"{CATALOGUE['source.bytes'].proves}{live}")


def _not_compared(count: int) -> str:
    return f"; {count:,} tensors come from a live model and were not compared" if count else ""


def _every_value(subject: Subject, listener: Listener) -> Iterator[Check]:
    scales = {header.name for module in subject.modules.values() for s, header in module.tensors.items() if s in SCALES}
    bad: set[str] = set()
    listener(Started(PHASE, sum(header.bytes for header in subject.checkpoint.tensors.values())))
    for header, codes in stream(subject.checkpoint):
        if header.name not in scales and header.name not in bad and holds_nonfinite(codes, header.dtype):
            bad.add(header.name)
        listener(Advanced(PHASE, codes.nbytes, header.name))
    listener(Finished(PHASE))
    tensors = subject.checkpoint.tensors
    nan_codes = [name for name in tensors if name in bad and tensors[name].dtype.startswith("F8_")]
    broken = [name for name in tensors if name in bad and name not in nan_codes]
    if nan_codes:
        yield finding("values.fp8_nan", "FP8 weights hold NaN codes", nan_codes)
    if broken:
        yield finding("values.finite", "stored values are NaN or infinite", broken)


def _errors(subject: Subject, listener: Listener) -> Iterator[Check]:
    """Dequantized weights against the source, row by row and scale group by scale group."""
    assert subject.source is not None
    from sparkquant.verification.weight_error import fault

    known = origins(subject.source, subject.layout)
    work: list[tuple[StoredModule, Origin]] = []
    live = 0
    for name, scheme in readable_schemes(subject).items():
        module = StoredModule(name, subject.modules[name].tensors, scheme)
        if name in known and module.shape == known[name].shape:
            live += known[name].header.name in subject.overlaid
            if known[name].header.name not in subject.overlaid:
                work.append((module, known[name]))
    if not work and not live:
        yield from skipped("no quantized module can be compared", "values.error")
        return
    listener(Started(PHASE, sum(origin.bytes for _, origin in work)))
    off: dict[str, str] = {}
    for module, origin in work:
        what = fault(subject.checkpoint, module, subject.source, origin)
        if what:
            off[module.name] = what
        listener(Advanced(PHASE, origin.bytes, module.name))
    listener(Finished(PHASE))
    if off:
        name, what = next(iter(off.items()))
        measured = dict(list(off.items())[:MAX_NAMED])
        yield finding("values.error", f"{name}: {what}{_not_compared(live)}", off, measured=measured)
    elif live:
        yield Check("values.error", Status.PASS, f"{CATALOGUE['values.error'].proves}{_not_compared(live)}")
