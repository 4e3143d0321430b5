"""GPU code inside an ELF file: which architectures each fat binary of a compiled extension holds, from headers alone.

    ELF64 -> sections .nv_fatbin, __nv_relfatbin -> fat binaries (one per compiled source) -> entries (SASS or PTX)

Layout, little endian, as the CUDA 13.0 tools write it (the tests compare with what they were asked for):
fat binary  u32 magic 0xBA55ED50, u16 version, u16 header size, u64 size of the entries after the header
entry       u16 kind (1 PTX, 2 SASS), u16 version, u32 header size, u64 payload size, ... at 28 u32 architecture,
            at 40 u64 flags (bit 13: LZ4, 15: Zstandard, 20: this one alone, `sm_90a`, 21: its family, `sm_120f`)

Which kernels a fat binary holds is in the names at the beginning of its code; `MARKS` are the ones that matter here.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sparkquant.engine.kernels import parse_capability
from sparkquant.errors import UsageError
from sparkquant.marlin.noun import Noun
from sparkquant.marlin.unpacking import beginning

SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
MAGIC = 0xBA55ED50
PTX, SASS = 1, 2
ALONE, FAMILY = 1 << 20, 1 << 21
MAX_ENTRIES = 1_000_000
MAX_SECTIONS = 65_536
MAX_NAMES = 1 << 20
READ, UNPACKED = 1 << 18, 1 << 17
"""Bytes of an entry that are read and unpacked for its names, which come first."""


class Code(Noun):
    """One architecture: `kind` is `sass` or `ptx`, `sm` like 120, `variant` "" , `a` (alone) or `f` (family)."""

    kind: str
    sm: int
    variant: str

    @property
    def name(self) -> str:
        """`sm_120f`, `compute_80`."""
        return f"{'sm' if self.kind == 'sass' else 'compute'}_{self.sm}{self.variant}"


MARKS = {
    "marlin": b"6MarlinI",
    "marlin-helper": b"marlin",
    "guard-family": b"enable_sm120_family",
    "guard-only": b"enable_sm120_only",
}
"""Parts of mangled names: Marlin's matrix product, kernels beside it (repacking, permuting), and the two guards around
CUTLASS kernels for 12.x. The guard `only` is a trap on every chip but 12.0."""


class Module(Noun):
    """Fat binaries that are alike: their architectures, the `MARKS` in their names, and how many there are."""

    codes: tuple[Code, ...]
    marks: tuple[str, ...]
    count: int


class Extension(Noun):
    """One file. `named`: names were read; without it no fat binary has marks."""

    path: str
    size: int
    modules: tuple[Module, ...]
    named: bool
    problem: str

    @property
    def codes(self) -> tuple[Code, ...]:
        """Every architecture that some fat binary holds."""
        found = {code for module in self.modules for code in module.codes}
        return tuple(sorted(found, key=lambda code: (code.kind != "sass", code.sm, code.variant)))

    def fit(self, capability: str, mark: str = "") -> dict[str, int]:
        """How many fat binaries (with a mark) run how: `native`, `family`, `compatible`, `ptx` or `none`."""
        counts: Counter[str] = Counter()
        for module in self.modules:
            if not mark or mark in module.marks:
                counts[fit(module.codes, capability)] += module.count
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


def read_extension(path: str | os.PathLike[str], *, names: bool = False) -> Extension:
    """The GPU code of one file. A file without any has no modules; one that is damaged has a `problem`.

    Headers alone are read, with `names` also the beginning of each fat binary's code: memory does not grow with the
    file. Raises UsageError when it cannot be opened.
    """
    counts: Counter[tuple[tuple[Code, ...], tuple[str, ...]]] = Counter()
    problem, named = "", names
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            try:
                for start, length in _sections(file, size):
                    for entries in _binaries(file, start, length):
                        marks = _marks(file, entries) if names else ()
                        named = named and marks is not None
                        counts[_codes(entries), marks or ()] += 1
            except (ValueError, struct.error) as error:
                problem = str(error)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", hint="pass a shared library") from None
    order = sorted(counts.items(), key=lambda item: (-item[1], [code.name for code in item[0][0]], item[0][1]))
    modules = tuple(Module(codes=codes, marks=marks, count=count) for (codes, marks), count in order)
    return Extension(path=str(path), size=size, modules=modules, named=named, problem=problem)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where the payload of one architecture lies, and how it is packed."""

    code: Code
    at: int
    size: int
    flags: int


def _codes(entries: list[_Entry]) -> tuple[Code, ...]:
    return tuple(sorted({e.code for e in entries}, key=lambda code: (code.kind != "sass", code.sm, code.variant)))


def _marks(file: BinaryIO, entries: list[_Entry]) -> tuple[str, ...] | None:
    """The marks in the first names of a fat binary; None where they cannot be unpacked.

    All its entries hold the same kernels, so the first one with machine code stands for them.
    """
    entry = next((entry for entry in entries if entry.code.kind == "sass"), entries[0])
    data = beginning(_read(file, entry.at, min(entry.size, READ)), entry.flags, UNPACKED)
    return None if data is None else tuple(name for name, text in MARKS.items() if text in data)


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


def _binaries(file: BinaryIO, start: int, length: int) -> Iterator[list[_Entry]]:
    """The entries of each fat binary of a section; empty ones (of host-only sources) are left out."""
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
        entries: list[_Entry] = []
        for entry in _entries(file, at + header, at + header + size):
            seen += 1
            if seen > MAX_ENTRIES:
                raise ValueError(f"more than {MAX_ENTRIES:,} entries")
            entries.append(entry)
        if entries:
            yield entries
        at += header + size


def _entries(file: BinaryIO, at: int, end: int) -> Iterator[_Entry]:
    while at + 64 <= end:
        head = _read(file, at, 64)
        kind, _, header, size = struct.unpack_from("<HHIQ", head)
        sm, flags = *struct.unpack_from("<I", head, 28), *struct.unpack_from("<Q", head, 40)
        if header < 64 or at + header + size > end:
            raise ValueError(f"the entry at byte {at} is longer than its fat binary")
        if kind in (PTX, SASS):
            variant = "a" if flags & ALONE else "f" if flags & FAMILY else ""
            code = Code(kind="ptx" if kind == PTX else "sass", sm=sm, variant=variant)
            yield _Entry(code, at + header, size, flags)
        at += header + size
