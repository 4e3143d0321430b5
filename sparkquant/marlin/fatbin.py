"""GPU code inside an ELF file: which architectures each fat binary of a compiled extension holds, from headers alone.

    ELF64 -> sections .nv_fatbin, __nv_relfatbin -> fat binaries (one per compiled source) -> entries (SASS or PTX)

Layout, little endian, as the CUDA 13.0 tools write it (the tests compare with what they were asked for):
fat binary  u32 magic 0xBA55ED50, u16 version, u16 header size, u64 size of the entries after the header
entry       u16 kind (1 PTX, 2 SASS), u16 version, u32 header size, u64 payload size, ... at 28 u32 architecture,
            at 40 u64 flags (bit 20: this architecture alone, `sm_90a`; bit 21: its family, `sm_120f`)
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sparkquant.engine.kernels import parse_capability
from sparkquant.errors import UsageError
from sparkquant.marlin.noun import Noun

SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
MAGIC = 0xBA55ED50
PTX, SASS = 1, 2
ALONE, FAMILY = 1 << 20, 1 << 21
MAX_ENTRIES = 1_000_000
MAX_SECTIONS = 65_536
MAX_NAMES = 1 << 20


class Code(Noun):
    """One architecture: `kind` is `sass` or `ptx`, `sm` like 120, `variant` "" , `a` (alone) or `f` (family)."""

    kind: str
    sm: int
    variant: str

    @property
    def name(self) -> str:
        """`sm_120f`, `compute_80`."""
        return f"{'sm' if self.kind == 'sass' else 'compute'}_{self.sm}{self.variant}"


class Extension(Noun):
    """One file. `modules`: the distinct lists of architectures of its fat binaries, with how many have each."""

    path: str
    size: int
    modules: tuple[tuple[tuple[Code, ...], int], ...]
    problem: str

    @property
    def codes(self) -> tuple[Code, ...]:
        """Every architecture that some fat binary holds."""
        found = {code for codes, _ in self.modules for code in codes}
        return tuple(sorted(found, key=lambda code: (code.kind != "sass", code.sm, code.variant)))

    def fit(self, capability: str) -> dict[str, int]:
        """How many fat binaries run how on a capability: `native`, `family`, `compatible`, `ptx` or `none`."""
        counts: Counter[str] = Counter()
        for codes, count in self.modules:
            counts[fit(codes, capability)] += count
        return {name: counts[name] for name in FITS if counts[name]}


FITS = ("native", "family", "compatible", "ptx", "none")


def fit(codes: tuple[Code, ...], capability: str) -> str:
    """How the driver runs one fat binary.

    native      machine code of exactly this architecture
    family      machine code for the family that it belongs to (`sm_120f` on 12.1)
    compatible  plain machine code of a lower minor number of the same generation (`sm_120` on 12.1)
    ptx         no machine code fits: the driver compiles an older intermediate code when the kernel is loaded
    none        nothing fits: the first launch fails with `no kernel image is available`
    Source: CUDA programming guide, "Compute capabilities", binary and PTX compatibility, family- and
    architecture-specific features.
    """
    major, minor = parse_capability(capability)
    fits = {_fit(code, major, minor) for code in codes}
    return next(name for name in FITS if name in fits or name == "none")


def _fit(code: Code, major: int, minor: int) -> str:
    own = divmod(code.sm, 10)
    same = own[0] == major and own[1] <= minor
    if code.kind == "ptx":
        if code.variant == "a":
            return "ptx" if own == (major, minor) else "none"
        return "ptx" if (same if code.variant == "f" else own <= (major, minor)) else "none"
    if own == (major, minor):
        return "native"
    return "none" if not same or code.variant == "a" else "family" if code.variant == "f" else "compatible"


def read_extension(path: str | os.PathLike[str]) -> Extension:
    """The GPU code of one file. A file without any has no modules; one that is damaged has a `problem`.

    Headers alone are read: memory does not grow with the file. Raises UsageError when it cannot be opened.
    """
    counts: Counter[tuple[Code, ...]] = Counter()
    problem = ""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            try:
                for start, length in _sections(file, size):
                    for codes in _binaries(file, start, length):
                        counts[codes] += 1
            except (ValueError, struct.error) as error:
                problem = str(error)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", hint="pass a shared library") from None
    order = sorted(counts.items(), key=lambda item: (-item[1], [code.name for code in item[0]]))
    return Extension(path=str(path), size=size, modules=tuple(order), problem=problem)


def _read(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    data = file.read(count)
    if len(data) != count:
        raise ValueError(f"the file ends inside a header at byte {offset}")
    return data


def _sections(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Offset and length of the sections with fat binaries."""
    ident = _read(file, 0, 64)
    if ident[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF file")
    table, entry, count, names = *struct.unpack_from("<Q", ident, 40), *struct.unpack_from("<HHH", ident, 58)
    if not count:
        return  # stripped of its section headers
    if entry < 64 or count > MAX_SECTIONS or names >= count:
        raise ValueError("damaged section headers")
    headers = _read(file, table, entry * count)
    fields = [struct.unpack_from("<IIQQQQ", headers, entry * i) for i in range(count)]
    text = _read(file, fields[names][4], min(fields[names][5], MAX_NAMES))
    for name, _, _, _, offset, length in fields:
        if text[name : text.find(b"\0", name)] in SECTIONS:
            if offset + length > size:
                raise ValueError("a section lies beyond the end of the file")
            yield offset, length


def _binaries(file: BinaryIO, start: int, length: int) -> Iterator[tuple[Code, ...]]:
    """The architectures of each fat binary of a section; empty ones (of host-only sources) are left out."""
    at, end, seen = start, start + length, 0
    while at + 16 <= end:
        magic, _, header, size = struct.unpack("<IHHQ", _read(file, at, 16))
        if magic != MAGIC:
            if magic:
                raise ValueError(f"no fat binary at byte {at}")
            at += 8  # alignment between two of them
            continue
        if header < 16 or at + header + size > end:
            raise ValueError(f"the fat binary at byte {at} is longer than its section")
        codes: list[Code] = []
        for code in _entries(file, at + header, at + header + size):
            seen += 1
            if seen > MAX_ENTRIES:
                raise ValueError(f"more than {MAX_ENTRIES:,} entries")
            codes.append(code)
        if codes:
            yield tuple(sorted(set(codes), key=lambda code: (code.kind != "sass", code.sm, code.variant)))
        at += header + size


def _entries(file: BinaryIO, at: int, end: int) -> Iterator[Code]:
    while at + 64 <= end:
        head = _read(file, at, 64)
        kind, _, header, size = struct.unpack_from("<HHIQ", head)
        sm, flags = *struct.unpack_from("<I", head, 28), *struct.unpack_from("<Q", head, 40)
        if header < 64 or at + header + size > end:
            raise ValueError(f"the entry at byte {at} is longer than its fat binary")
        if kind in (PTX, SASS):
            variant = "a" if flags & ALONE else "f" if flags & FAMILY else ""
            yield Code(kind="ptx" if kind == PTX else "sass", sm=sm, variant=variant)
        at += header + size
