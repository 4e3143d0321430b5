"""Folders from strangers: a clear error or a finding, in bounded time and memory, and nothing is read outside."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError, UnsupportedFormat, UsageError
from sparkquant.formats import stored_modules
from sparkquant.verification.gate import verify
from tests.verification.conftest import Draft, Good, findings

SHARD = "model.safetensors"
CATASTROPHES = [
    "re:(a*)*b", "re:(a|a)*$", "re:((((.*)*)*)*)*x", "re:(.*.*.*.*.*.*.*)z", "re:(?=(.+)+)(.+)+$", "re:" + "(" * 900,
    "re:(a{1000}){1000}", "re:[", "re:*", "re:(?P<n>a)(?P=n)", "re:" + "a?" * 900 + "a" * 900, "re:\\", "re:(?i)(a+)+$",
    "re:" + ".*" * 900, "re:(?:m|mo|mod)*(?:.{0,99}){9}q",
]  # fmt: skip


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header = change(header) or header
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


def overlap(header: dict[str, Any]) -> None:
    first, second, *_ = [entry for name, entry in header.items() if name != "__metadata__" and len(entry["shape"]) == 1]
    second.update(first)


def lying_index(shard: str) -> Callable[[Path], None]:
    def attack(path: Path) -> None:
        index = {"weight_map": {"model.language_model.norm.weight": shard}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    return attack


def linked(name: str) -> Callable[[Path], None]:
    def attack(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to("/etc/passwd")

    return attack


def as_fifo(name: str) -> Callable[[Path], None]:
    def attack(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return attack


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    raw = content.encode() if isinstance(content, str) else content
    return lambda path: (path / name).write_bytes(raw) and None


UNREADABLE: dict[str, Callable[[Path], None]] = {
    "header of 2^60 bytes": lambda path: text(SHARD, struct.pack("<Q", 2**60) + b"{}")(path),
    "header longer than the file": lambda path: text(SHARD, struct.pack("<Q", 5000) + b"{}")(path),
    "overlapping offsets": lambda path: rewrite_header(path / SHARD, overlap),
    "header is a list": lambda path: rewrite_header(path / SHARD, lambda header: [1]),
    "negative offsets": lambda path: rewrite_header(
        path / SHARD, lambda header: {"a": {"dtype": "U8", "shape": [2], "data_offsets": [-2, 0]}}
    ),
    "truncated shard": lambda path: os.truncate(path / SHARD, (path / SHARD).stat().st_size - 5),
    "empty shard": lambda path: os.truncate(path / SHARD, 0),
    "index to ../../etc/passwd": lying_index("../../etc/passwd"),
    "index to an absolute path": lying_index("/etc/passwd"),
    "index to an absolute shard": lying_index("/tmp/x.safetensors"),
    "index to a missing shard": lying_index("other.safetensors"),
    "index is a list": text("model.safetensors.index.json", "[]"),
    "config is a list": text("config.json", "[]"),
    "config is nested brackets": text("config.json", "[" * 1_000_000),
    "config is nested objects": text("config.json", '{"a":' * 1_000_000),
    "config is no text": text("config.json", b"\xff\xfe\x00"),
    "config has a key twice": text("config.json", '{"a": 1, "a": 2}'),
    "config is absent": lambda path: (path / "config.json").unlink(),
    "config links out": linked("config.json"),
    "config is a pipe": as_fifo("config.json"),
    "shard links out": linked(SHARD),
    "shard is a pipe": as_fifo(SHARD),
    "only pickles": lambda path: (path / SHARD).rename(path / "pytorch_model.bin") and None,
}


@pytest.mark.parametrize("attack", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_folders_are_one_clear_error(attack: Callable[[Path], None], draft: Callable[..., Draft]) -> None:
    path = draft().path
    attack(path)
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    assert str(path) in str(caught.value)


def test_arguments(tmp_path: Path, good: Good) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        verify(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="shallow"):
        verify(good("qwen-hybrid-w4a16").out, level="shallow")


@pytest.mark.parametrize("method", ["bitsandbytes", ["compressed-tensors"], None, {}])
def test_a_foreign_quant_method_is_named(method: Any, draft: Callable[..., Draft]) -> None:
    broken = draft()
    broken.block["quant_method"] = method
    broken.save()
    with pytest.raises(UnsupportedFormat, match="quant_method"):
        verify(broken.path)
    with pytest.raises(UnsupportedFormat):
        stored_modules(Checkpoint.open(broken.path))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "tokenizer.json", "LICENSE"])
def test_side_files_that_link_out_are_not_read(name: str, draft: Callable[..., Draft]) -> None:
    broken = draft()
    linked(name)(broken.path)
    assert {"files.link", "source.files_missing"} <= findings(verify(broken.path, source=broken.source))


def test_links_of_the_hub_cache_are_followed(draft: Callable[..., Draft], tmp_path: Path) -> None:
    made = draft().path
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(made.iterdir())):
        if file.is_file():
            shutil.copy(file, blobs / str(number))
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert findings(verify(snapshot)) == set()


@pytest.mark.parametrize("pattern", CATASTROPHES, ids=lambda pattern: pattern[:20])
def test_patterns_cannot_hang(pattern: str, draft: Callable[..., Draft]) -> None:
    broken = draft()
    broken.forget_plan()
    broken.block["ignore"].append(pattern)
    broken.group("pack-quantized")["targets"].insert(0, pattern)
    broken.save()
    started = time.process_time()
    verify(broken.path, level="headers")
    assert time.process_time() - started < 15


def test_a_million_brackets_in_a_plan(draft: Callable[..., Draft]) -> None:
    broken = draft()
    text("sparkquant/plan.json", '{"decisions":' + "[" * 1_000_000)(broken.path)
    assert findings(verify(broken.path)) == {"plan.readable"}


def test_a_plan_of_a_million_experts(draft: Callable[..., Draft]) -> None:
    broken = draft()
    path = broken.path / "sparkquant" / "plan.json"
    plan = json.loads(path.read_text())
    plan["decisions"][0] |= {"experts": 10**9, "outputs": [["{expert}", "BF16", [1]]]}
    path.write_text(json.dumps(plan))
    assert findings(verify(broken.path)) == {"plan.readable"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["re:.*", "Linear", "group", "float", "pack-quantized", "mixed-precision", "compressed-tensors"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def paths_of(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value that can be replaced."""
    found = [prefix] if prefix else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths_of(inner, (*prefix, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    result = copy.deepcopy(value)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return result


def survives(path: Path, **options: Any) -> None:
    with suppress(CheckpointError):
        verify(path, **options)


@pytest.fixture(scope="module")
def victim(good: Good, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("victim") / "out"
    shutil.copytree(good("qwen-hybrid-nvfp4-fp8").out, path)
    return path


JSON_FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "sparkquant/plan.json"]


@pytest.mark.parametrize("name", JSON_FILES)
@given(data=st.data())
def test_any_value_in_any_json_file(name: str, data: st.DataObject, victim: Path) -> None:
    original = (victim / name).read_bytes()
    value = json.loads(original)
    if name.endswith("plan.json"):
        value["decisions"] = value["decisions"][:3]
    new = data.draw(JSON | st.just(...))
    (victim / name).write_text(json.dumps(replaced(value, data.draw(st.sampled_from(paths_of(value))), new)))
    try:
        survives(victim)
    finally:
        (victim / name).write_bytes(original)


@given(data=st.data())
def test_any_value_in_a_header(data: st.DataObject, victim: Path) -> None:
    path = victim / SHARD
    original = path.read_bytes()

    def change(header: dict[str, Any]) -> dict[str, Any]:
        name = data.draw(st.sampled_from(sorted(header)))
        entry = {name: header[name]}
        places = paths_of(entry)
        fresh = data.draw(JSON | st.just(...) | st.sampled_from(["BF16", "F8_E4M3", [], [0], [1, 1], [0, 2**50]]))
        return {key: value for key, value in header.items() if key != name} | replaced(
            entry, data.draw(st.sampled_from(places)), fresh
        )

    rewrite_header(path, change)
    try:
        survives(victim)
    finally:
        path.write_bytes(original)


@given(data=st.data())
def test_any_shape_of_the_same_bytes(data: st.DataObject, victim: Path) -> None:
    """Headers that are consistent in themselves, with dtypes and shapes that no scheme expects."""
    path = victim / SHARD
    original = path.read_bytes()
    widths = {"U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8, "C64": 8}

    def change(header: dict[str, Any]) -> None:
        names = st.sampled_from(sorted(set(header) - {"__metadata__"}))
        for name in data.draw(st.lists(names, min_size=1, max_size=6)):
            entry = header[name]
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            dtype = data.draw(st.sampled_from([d for d, width in widths.items() if size % width == 0]))
            count = size // widths[dtype]
            split = data.draw(st.sampled_from([d for d in (1, 2, 4, 16) if count % d == 0]))
            shapes = [[count], [split, count // split], [count // split, split], [1, split, count // split]]
            entry.update(dtype=dtype, shape=data.draw(st.sampled_from(shapes)))

    rewrite_header(path, change)
    try:
        survives(victim, level="deep")
    finally:
        path.write_bytes(original)
