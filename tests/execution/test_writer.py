"""Shard files: the safetensors library's own bytes, and nothing that the plan does not describe."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sparkquant import shard_writer as module
from sparkquant.checkpoint import read_header
from sparkquant.errors import CheckpointError, PlanViolation
from sparkquant.reading import DTYPE_NAMES, TORCH_DTYPES, raw_bytes
from sparkquant.schemes import DTYPE_BYTES, OutputTensor
from sparkquant.shard_writer import ShardWriter, shard_layout

SMALL = [OutputTensor("a", "F32", (2, 3)), OutputTensor("b", "I64", (1,))]


def _random(dtype: str, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Any bit pattern that the dtype has, from a seed."""
    count = DTYPE_BYTES[dtype]
    for size in shape:
        count *= size
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == "BOOL" else 256
    raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(TORCH_DTYPES[dtype]).reshape(tuple(shape))


def _planned(tensors: dict[str, torch.Tensor]) -> list[OutputTensor]:
    return [OutputTensor(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]


def _write(path: Path, tensors: dict[str, torch.Tensor], *, order: Sequence[str] = ()) -> None:
    writer = ShardWriter(path, _planned(tensors))
    for name in order or tensors:
        tensor = tensors[name]
        writer.put(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), raw_bytes(tensor))
    writer.close()


def test_every_dtype_lies_where_the_safetensors_library_puts_it(tmp_path: Path) -> None:
    assert set(TORCH_DTYPES) == set(DTYPE_BYTES) == set(module._ALIGNMENT_ORDER)
    tensors = {f"{dtype}.weight": _random(dtype, (3, 5), seed) for seed, dtype in enumerate(DTYPE_BYTES)}
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    _write(tmp_path / "ours", tensors)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


_names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=24)
_shapes = st.lists(st.integers(0, 5), max_size=4)


@given(
    st.dictionaries(_names.filter(lambda n: n != "__metadata__"), st.tuples(st.sampled_from([*DTYPE_BYTES]), _shapes)),
    st.randoms(use_true_random=False),
)
def test_any_names_and_shapes_give_the_librarys_bytes(
    tmp_path: Path, described: dict[str, tuple[str, list[int]]], random: Any
) -> None:
    tensors = {name: _random(dtype, shape, index) for index, (name, (dtype, shape)) in enumerate(described.items())}
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    arrival = list(tensors)
    random.shuffle(arrival)
    _write(tmp_path / "ours", tensors, order=arrival)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


def test_the_library_reads_back_what_was_put(tmp_path: Path) -> None:
    tensors = {"Größe.重み": _random("BF16", (4, 4)), "b": _random("U8", (7,)), "scalar": torch.tensor(3.5)}
    _write(tmp_path / "x.safetensors", tensors)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert raw_bytes(read[name]).tobytes() == raw_bytes(tensor).tobytes()
    headers, metadata = read_header(tmp_path / "x.safetensors")
    assert metadata == {"format": "pt"}
    assert {h.name: h.start for h in headers.values()} == shard_layout(_planned(tensors))[1]


def test_wide_types_are_aligned(tmp_path: Path) -> None:
    tensors = {f"{dtype}.{n}": _random(dtype, (n,)) for dtype in DTYPE_BYTES for n in (1, 3)}
    _, offsets = shard_layout(_planned(tensors))
    assert all(offsets[name] % DTYPE_BYTES[name.split(".")[0]] == 0 for name in tensors)


@given(st.integers(0, 4000), st.integers(0, 4000))
def test_copied_ranges_are_exact(tmp_path: Path, start: int, size: int) -> None:
    data = bytes(index * 7 % 251 for index in range(8000))
    (tmp_path / "source").write_bytes(data)
    writer = ShardWriter(tmp_path / "x", [OutputTensor("t", "U8", (size,))])
    with (tmp_path / "source").open("rb", buffering=0) as source:
        writer.copy("t", "U8", (size,), source, start, size)
    writer.close()
    assert bytes(load_file(tmp_path / "x")["t"].tolist()) == data[start : start + size]


@pytest.mark.parametrize("works", ["in the kernel", "across file systems", "on a file system that copies nothing"])
def test_copies_survive_file_systems_without_copy_file_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if works != "in the kernel":
        monkeypatch.setattr(os, "copy_file_range", refuse if "across" in works else lambda *_: 0)
    monkeypatch.setattr(module, "_COPY_BYTES", 100)
    (tmp_path / "source").write_bytes(bytes(range(256)) * 4)
    writer = ShardWriter(tmp_path / "x", [OutputTensor("t", "U8", (777,))])
    with (tmp_path / "source").open("rb", buffering=0) as source:
        writer.copy("t", "U8", (777,), source, 11, 777)
    writer.close()
    assert (tmp_path / "x").read_bytes().endswith((bytes(range(256)) * 4)[11:788])


def test_a_source_that_ends_early_is_named(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(100))
    writer = ShardWriter(tmp_path / "x", [OutputTensor("t", "U8", (200,))])
    with (
        (tmp_path / "source").open("rb", buffering=0) as source,
        pytest.raises(CheckpointError, match=r"source: ends inside t\n"),
    ):
        writer.copy("t", "U8", (200,), source, 0, 200)
    writer.abandon()


# Nothing but the plan


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "size", "message"),
    [
        ("c", "F32", (2, 3), 24, "c is not in the plan of this shard"),
        ("a", "BF16", (2, 3), 12, r"a: BF16 \[2, 3\], 12 bytes; the plan says F32 \[2, 3\], 24 bytes"),
        ("a", "I32", (2, 3), 24, r"a: I32"),
        ("a", "F32", (3, 2), 24, r"a: F32 \[3, 2\]"),
        ("a", "F32", (6,), 24, r"a: F32 \[6\]"),
        ("a", "F32", (2, 3), 20, r"20 bytes; the plan says"),
        ("a", "F32", (2, 3), 28, r"28 bytes; the plan says"),
    ],
)
def test_what_the_plan_does_not_describe_is_refused(
    tmp_path: Path, name: str, dtype: str, shape: tuple[int, ...], size: int, message: str
) -> None:
    writer = ShardWriter(tmp_path / "x", SMALL)
    before = (tmp_path / "x").read_bytes()
    with pytest.raises(PlanViolation, match=message) as caught:
        writer.put(name, dtype, shape, memoryview(bytes(size)))
    assert caught.value.exit_code == 1
    with (tmp_path / "x").open("rb") as source, pytest.raises(PlanViolation, match=message):
        writer.copy(name, dtype, shape, source, 0, size)
    writer.abandon()
    assert (tmp_path / "x").read_bytes() == before


def test_a_tensor_may_arrive_once(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", SMALL)
    writer.put("b", "I64", (1,), memoryview(bytes(8)))
    with pytest.raises(PlanViolation, match="b was stored already"):
        writer.put("b", "I64", (1,), memoryview(bytes(8)))
    writer.abandon()


def test_every_planned_tensor_must_arrive(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", SMALL)
    writer.put("b", "I64", (1,), memoryview(bytes(8)))
    with pytest.raises(PlanViolation, match="1 planned tensors never arrived, for instance a"):
        writer.close()


def test_two_planned_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(PlanViolation, match="a is planned twice"):
        shard_layout([*SMALL, SMALL[0]])


# Pieces


def test_pieces_may_come_in_any_order_from_any_thread(tmp_path: Path) -> None:
    tensors = {"a": _random("BF16", (300, 64), 1), "b": _random("F32", (128, 64), 2)}
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    _write(whole, tensors)
    writer = ShardWriter(pieces, _planned(tensors))
    rooms = {name: writer.room(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    raw = {name: raw_bytes(t) for name, t in tensors.items()}
    places = [(name, at) for name, data in raw.items() for at in range(0, data.nbytes, 1000)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda p: rooms[p[0]].write(p[1], raw[p[0]][p[1] : p[1] + 1000]), reversed(places)))
    writer.close()
    assert pieces.read_bytes() == whole.read_bytes()


def test_a_piece_may_not_leave_its_tensor_and_none_may_be_missing(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", SMALL)
    with pytest.raises(PlanViolation, match=r"a: F32 \[3, 2\]"):
        writer.room("a", "F32", (3, 2))
    room = writer.room("a", "F32", (2, 3))
    for offset, size in ((-1, 4), (20, 5), (24, 1)):
        with pytest.raises(PlanViolation, match=rf"a: {size} bytes at {offset} are more than its 24"):
            room.write(offset, memoryview(bytes(size)))
    with pytest.raises(PlanViolation, match="a was stored already"):
        writer.room("a", "F32", (2, 3))
    room.write(0, memoryview(bytes(20)))
    writer.put("b", "I64", (1,), memoryview(bytes(8)))
    with pytest.raises(PlanViolation, match="1 planned tensors never arrived, for instance a"):
        writer.close()
