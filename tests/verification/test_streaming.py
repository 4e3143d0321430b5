"""Every stored byte comes by once, in whole elements, however tensors lie in the files."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError
from sparkquant.verification import streaming
from sparkquant.verification.payload import decode
from sparkquant.verification.scales import _fp8_faults
from sparkquant.verification.streaming import holds_nonfinite, stream
from tests.checkpoints import write_json, write_shards
from tests.verification.conftest import Good

WIDTHS = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}


@given(
    sizes=st.lists(st.tuples(st.sampled_from(sorted(WIDTHS)), st.integers(1, 90)), min_size=1, max_size=8),
    piece=st.sampled_from([8, 16, 24, 64, 1 << 20]),
    shards=st.integers(1, 3),
)
def test_all_bytes_come_once_in_whole_elements(
    sizes: list[tuple[str, int]], piece: int, shards: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    random = np.random.default_rng(len(sizes))
    tensors = {
        f"t{i}": (dtype, (count,), random.bytes(count * WIDTHS[dtype])) for i, (dtype, count) in enumerate(sizes)
    }
    write_json(folder / "config.json", {})
    write_shards(folder, tensors, shards=min(shards, len(tensors)))
    checkpoint = Checkpoint.open(folder, strict=False)
    found: dict[str, bytes] = dict.fromkeys(tensors, b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "PIECE_BYTES", piece)
        for header, codes in stream(checkpoint):
            assert codes.dtype.itemsize == WIDTHS[header.dtype]
            found[header.name] += codes.tobytes()
    assert found == {name: raw for name, (_, _, raw) in tensors.items()}


def _codes(dtype: str, values: list[float]) -> Any:
    floats = np.array(values, np.float32)
    if dtype == "BF16":
        return (floats.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return floats.astype(np.float16).view(np.uint16)
    return floats.view(np.uint32) if dtype == "F32" else floats.astype(np.float64).view(np.uint64)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_what_is_not_finite_is_seen_wherever_it_is(dtype: str) -> None:
    many = 2 * streaming.CACHED_ELEMENTS + 5
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, streaming.CACHED_ELEMENTS, many - 1):
            values = [0.0] * many
            codes = _codes(dtype, values)
            assert not holds_nonfinite(codes, dtype)
            codes[place] = _codes(dtype, [bad])[0]
            assert holds_nonfinite(codes, dtype)
    assert not holds_nonfinite(_codes(dtype, [-3.3e38 if dtype != "F16" else -6e4, 1e-40, -0.0]), dtype)


def test_every_fp8_code() -> None:
    for code in range(256):
        codes = np.array([0, code], np.uint8)
        assert holds_nonfinite(codes, "F8_E4M3") == (code & 0x7F == 0x7F)
        assert holds_nonfinite(codes, "F8_E5M2") == (code & 0x7C == 0x7C)
        assert not holds_nonfinite(codes, "U8")


def test_every_fp8_scale_is_judged_as_its_value() -> None:
    for code in range(256):
        codes = np.array([[code]], np.uint8)
        value = float(decode(codes, "F8_E4M3")[0, 0])
        wanted = (not np.isfinite(value), value < 0, value == 0, False, 0 < abs(value) < 2**-6)
        assert tuple(_fp8_faults(codes)) == tuple(map(int, wanted)), code


def test_a_shard_that_ends_early_is_one_clear_error(good: Good, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(good("qwen-hybrid-w4a16").out)
    shard = next(iter(checkpoint.tensors.values())).shard
    (tmp_path / shard).write_bytes((checkpoint.path / shard).read_bytes()[:-9])
    moved = replace(checkpoint, path=tmp_path)
    with pytest.raises(CheckpointError, match="ends inside its tensors"):
        for _ in stream(moved):
            pass


def test_stopping_half_way_leaves_no_file_open(good: Good) -> None:
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    parts = stream(Checkpoint.open(good("qwen-hybrid-w4a16").out))
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    assert not before or len(list(Path("/proc/self/fd").iterdir())) == before


def test_headers_are_little_endian_json(tmp_path: Path) -> None:
    """A tensor that starts at an odd offset is read as it is."""
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "BF16", "shape": [2], "data_offsets": [3, 7]},
        }
    ).encode()
    data = b"\1\2\3" + struct.pack("<2H", 0x3F80, 0x7F80)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    write_json(tmp_path / "config.json", {})
    parts = {h.name: codes.tolist() for h, codes in stream(Checkpoint.open(tmp_path, strict=False))}
    assert parts == {"a": [1, 2, 3], "b": [0x3F80, 0x7F80]}
