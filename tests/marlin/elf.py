"""Shared libraries for tests: an ELF file around sections, and fat binaries around architectures."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

REAL = Path(__file__).parent / "fatbins"
"""Fat binaries that nvcc of CUDA 13.0 made of one kernel; their names say what they hold."""


def elf(sections: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A 64-bit little-endian ELF file with these sections (name, content) and nothing else."""
    names = b"\0" + b"".join(name + b"\0" for name, _ in sections) + b".shstrtab\0"
    body, headers, offset = b"", [struct.pack("<IIQQQQIIQQ", *[0] * 10)], 64
    at = 1
    for name, content in [*sections, (b".shstrtab", names)]:
        headers.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, offset, len(content), 0, 0, 8, 0))
        padded = content + b"\0" * (-len(content) % 8)
        body, offset, at = body + padded, offset + len(padded), at + len(name) + 1
    ident = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    count = len(headers)
    head = ident + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, offset, 0, 64, 0, 0, 64, count, count - 1)
    return head + body + b"".join(headers)


def fatbin(*codes: tuple[str, int, str], payload: int = 24, names: bytes = b"", packed: int = 0) -> bytes:
    """A fat binary with entries (`sass` or `ptx`, 120, "" or `a` or `f`) that all begin with these names.

    `packed`: the flag of the packing that `names` are in already.
    """
    content = names + b"\xaa" * max(0, payload - len(names))
    entries = b""
    for kind, sm, variant in codes:
        flags = 0x11 | packed | {"": 0, "a": 1 << 20, "f": 1 << 21}[variant]
        number = {"ptx": 1, "sass": 2}[kind]
        head = struct.pack("<HHIQIIHHIQQQQ", number, 0x101, 64, len(content), 0, 0, 8, 1, sm, 0, flags, 0, 0)
        entries += head + content
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def library(*binaries: bytes, section: bytes = b".nv_fatbin") -> bytes:
    """A shared library with fat binaries among other sections."""
    return elf([(b".text", b"\x90" * 40), (section, b"".join(binaries)), (b".data", b"\0" * 9)])
