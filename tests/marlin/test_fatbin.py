"""Architectures are read from real fat binaries, generated ones and damaged ones."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.errors import UsageError
from sparkquant.marlin.fatbin import FITS, Code, fit, read_extension
from sparkquant.marlin.unpacking import LZ4, ZSTD, beginning
from tests.marlin.elf import REAL, elf, fatbin, library

SMS = [75, 80, 90, 100, 103, 120, 121]
CODES = st.tuples(st.sampled_from(["sass", "ptx"]), st.sampled_from(SMS), st.sampled_from(["", "a", "f"]))
WHOLE = library(fatbin(("sass", 90, "")))


def names(path: Path) -> list[str]:
    return [code.name for code in read_extension(path).codes]


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("mixed", ["sm_80", "sm_90a", "sm_120f", "compute_90"]),
        ("alone", ["sm_120a", "sm_121a"]),
        ("ptx", ["compute_120a", "compute_120f"]),
        ("plain", ["sm_75", "sm_120"]),
        ("native", ["sm_103f", "sm_121"]),
    ],
)
@pytest.mark.parametrize("section", [b".nv_fatbin", b"__nv_relfatbin"])
def test_fat_binaries_of_the_real_compiler(tmp_path: Path, name: str, holds: list[str], section: bytes) -> None:
    file = tmp_path / "_C.abi3.so"
    file.write_bytes(library((REAL / f"{name}.fatbin").read_bytes(), section=section))
    found = read_extension(file)
    assert not found.problem
    assert [code.name for code in found.codes] == holds


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="nvcc is not installed: the recorded fat binaries stand for it"
)
def test_a_library_that_nvcc_links_now(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text("__global__ void k(float* x) { x[threadIdx.x] *= 2.f; }\n")
    wanted = [("120f", "sm_120f"), ("90a", "sm_90a"), ("80", "compute_80")]
    flags = [word for arch, code in wanted for word in ("-gencode", f"arch=compute_{arch},code={code}")]
    command = ["nvcc", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC", *flags, "k.cu", "-o", "k.so"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    assert set(names(tmp_path / "k.so")) == {"sm_120f", "sm_90a", "compute_80"}


@given(binaries=st.lists(st.lists(CODES, min_size=1, max_size=5), max_size=6))
def test_every_generated_architecture_is_found(tmp_path: Path, binaries: list[list[tuple[str, int, str]]]) -> None:
    file = tmp_path / "generated.so"
    file.write_bytes(library(*(fatbin(*codes) for codes in binaries)))
    found = read_extension(file)
    expected = {Code(kind=kind, sm=sm, variant=variant) for codes in binaries for kind, sm, variant in codes}
    assert set(found.codes) == expected
    assert sum(module.count for module in found.modules) == len(binaries)


CHIPS = {
    ("sass", 121, ""): "native", ("sass", 121, "a"): "native", ("sass", 121, "f"): "native",
    ("sass", 120, ""): "compatible", ("sass", 120, "f"): "family", ("sass", 120, "a"): "none",
    ("sass", 100, "f"): "none", ("sass", 90, ""): "none", ("ptx", 80, ""): "ptx", ("ptx", 121, "a"): "ptx",
    ("ptx", 120, "f"): "ptx", ("ptx", 120, "a"): "none", ("ptx", 100, "f"): "none", ("ptx", 90, "a"): "none",
}  # fmt: skip


@pytest.mark.parametrize(("code", "how"), CHIPS.items())
def test_how_code_runs_on_a_gb10(code: tuple[str, int, str], how: str) -> None:
    kind, sm, variant = code
    assert fit((Code(kind=kind, sm=sm, variant=variant),), "12.1") == how


def test_code_of_a_newer_minor_number_does_not_run_on_an_older_chip() -> None:
    assert fit((Code(kind="sass", sm=121, variant=""),), "12.0") == "none"
    assert fit((Code(kind="ptx", sm=121, variant=""),), "12.0") == "none"
    assert fit((), "12.1") == "none"


def test_the_best_of_several_counts(tmp_path: Path) -> None:
    file = tmp_path / "_moe_C.abi3.so"
    both = fatbin(("sass", 80, ""), ("ptx", 80, ""), ("sass", 120, "f"))
    file.write_bytes(library(both, fatbin(("ptx", 80, "")), fatbin(("sass", 90, "a")), fatbin(("sass", 120, ""))))
    assert read_extension(file).fit("12.1") == {"family": 1, "compatible": 1, "ptx": 1, "none": 1}
    assert list(read_extension(file).fit("9.0")) == [name for name in FITS if name in ("native", "ptx", "none")]


def test_empty_fat_binaries_and_alignment_between_them(tmp_path: Path) -> None:
    file = tmp_path / "x.so"
    file.write_bytes(library(fatbin(), b"\0" * 8, fatbin(("sass", 90, "")), b"\0" * 16, fatbin(("sass", 80, ""))))
    assert names(file) == ["sm_80", "sm_90"]


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x7fELF\x01\x01" + b"\0" * 58, b"\x7fELF\x02\x01" + b"\xff" * 58, WHOLE[:-70]],
    ids=["empty", "text", "32-bit", "garbage", "cut"],
)
def test_damage_is_a_problem_and_no_crash(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.so"
    file.write_bytes(content)
    assert read_extension(file).problem


def test_a_fat_binary_that_says_it_is_longer_than_it_is(tmp_path: Path) -> None:
    file = tmp_path / "x.so"
    whole = bytearray(fatbin(("sass", 90, "")))
    whole[8:16] = (1 << 40).to_bytes(8, "little")
    file.write_bytes(elf([(b".nv_fatbin", bytes(whole))]))
    assert "longer than its section" in read_extension(file).problem


@given(data=st.data())
def test_no_single_damaged_byte_crashes(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(library((REAL / "ptx.fatbin").read_bytes(), fatbin(("sass", 120, "f"))))
    index = data.draw(st.integers(0, len(whole) - 1))
    whole[index] = data.draw(st.integers(0, 255))
    file = tmp_path / "damaged.so"
    file.write_bytes(bytes(whole))
    read_extension(file)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "big.so"
    file.write_bytes(library(*[fatbin(("sass", 120, "f"), payload=4 << 20) for _ in range(8)]))
    tracemalloc.start()
    found = read_extension(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.fit("12.1") == {"family": 8}
    assert found.size > 32 << 20
    assert peak < 1 << 20


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_extension("/nonexistent/x.so")


def compress(data: bytes) -> bytes:
    """LZ4 with matches: literals once, then the same bytes again by a match over them."""
    half = len(data) // 2
    assert data[:half] == data[half:]
    literals = half - 15

    def more(count: int) -> bytes:
        return b"\xff" * (count // 255) + bytes([count % 255])

    first = bytes([0xFF]) + more(literals) + data[:half] + half.to_bytes(2, "little") + more(half - 4 - 15)
    return first


def test_names_are_read_whatever_the_packing(tmp_path: Path) -> None:
    names = (b".shstrtab\0.text._ZN16marlin_moe_wna166MarlinILl11" + b"\0" * 60) * 2
    file = tmp_path / "_moe_C.abi3.so"
    file.write_bytes(
        library(
            fatbin(("sass", 80, ""), names=names),
            fatbin(("sass", 90, ""), names=compress(names), packed=1 << 13),
            fatbin(("sass", 100, ""), names=b"\xff" * 40, packed=1 << 13),
        )
    )
    found = read_extension(file, names=True)
    assert found.named
    marked = {module.codes[0].sm: module.marks for module in found.modules}
    assert marked == {80: ("marlin", "marlin-helper"), 90: ("marlin", "marlin-helper"), 100: ()}
    assert found.fit("9.0", "marlin") == {"native": 1, "none": 1}
    assert read_extension(file).fit("9.0", "marlin") == {}


@pytest.mark.parametrize(("name", "flags"), [("mixed", 0), ("ptx", ZSTD), ("plain", LZ4)])
def test_the_compiler_s_own_packing_is_undone(name: str, flags: int) -> None:
    """The kernel of these files is `_Z1kPf`; which packing nvcc used is in their flags."""
    text = (REAL / f"{name}.fatbin").read_bytes()
    if flags & ZSTD and beginning(b"", ZSTD, 1) is None:
        pytest.skip("libzstd is not installed")
    at, found = 16, []
    while at < len(text):
        header, size = struct.unpack_from("<IQ", text, at + 4)
        (own,) = struct.unpack_from("<Q", text, at + 40)
        data = beginning(text[at + header : at + header + size], own, 1 << 16)
        found.append((own & (ZSTD | LZ4), b"_Z1kPf" in (data or b"")))
        at += header + size
    assert all(named for _, named in found)
    assert flags in [packing for packing, _ in found]


@given(st.binary(max_size=300), st.sampled_from([LZ4, ZSTD, 0]), st.integers(1, 500))
def test_unpacking_anything_is_bounded(data: bytes, flags: int, limit: int) -> None:
    made = beginning(data, flags, limit)
    assert made is None or len(made) <= limit
