"""A folder from somewhere else is hostile until its headers are proven: only CheckpointError leaves the reader."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.checkpoint import INDEX, MAX_HEADER_BYTES, Checkpoint, read_header, read_json
from sparkquant.errors import CheckpointError, UsageError
from sparkquant.schemes import DTYPE_BYTES
from sparkquant.source import as_path, locate
from tests.checkpoints import CONFIGS, read_raw, write_json, write_safetensors

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _file(path: Path, header: Any, payload: bytes = b"", *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + payload)
    return path


def _refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    text = str(caught.value)
    text.encode()  # printable on any terminal
    return text


def test_a_good_header_is_read_with_absolute_offsets(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]},
        "a": GOOD,
        "none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [20, 20]},
        "scalar": {"dtype": "I64", "shape": [], "data_offsets": [20, 28]},
    }
    path = _file(tmp_path / "x.safetensors", header, bytes(28))
    tensors, metadata = read_header(path)
    base = path.stat().st_size - 28
    assert metadata == {"format": "pt"}
    assert [(t.name, t.start - base, t.end - base, t.bytes, t.parameters) for t in tensors.values()] == [
        ("b", 8, 20, 12, 6), ("a", 0, 8, 8, 2), ("none", 20, 20, 0, 0), ("scalar", 20, 28, 8, 1),
    ]  # fmt: skip
    assert {t.shard for t in tensors.values()} == {"x.safetensors"}


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, MAX_HEADER_BYTES + 1, 10_000])
def test_a_length_beyond_the_file_is_refused_before_anything_is_allocated(tmp_path: Path, length: int) -> None:
    assert f"claims {length:,} bytes" in _refused(
        _file(tmp_path / "x.safetensors", {"a": GOOD}, bytes(8), length=length)
    )


@pytest.mark.parametrize("size", range(8))
def test_a_file_without_room_for_a_header_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    assert "too short" in _refused(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**GOOD, "dtype": "F33"}, "unknown dtype 'F33'"),
        ({**GOOD, "dtype": "F4"}, "unknown dtype"),
        ({**GOOD, "dtype": 5}, "unknown dtype 5"),
        ({**GOOD, "dtype": ["F32"]}, "unknown dtype"),
        ({"shape": [2], "data_offsets": [0, 8]}, "unknown dtype None"),
        ({**GOOD, "dtype": "F64"}, "F64 [2] does not take 8 bytes"),
        ({**GOOD, "shape": [3]}, "F32 [3] does not take 8 bytes"),
        ({**GOOD, "shape": [True, 2]}, "is not a list of sizes"),
        ({**GOOD, "shape": [-2]}, "is not a list of sizes"),
        ({**GOOD, "shape": [-1, -2]}, "is not a list of sizes"),
        ({**GOOD, "shape": [2.0]}, "is not a list of sizes"),
        ({**GOOD, "shape": ["2"]}, "is not a list of sizes"),
        ({**GOOD, "shape": 2}, "is not a list of sizes"),
        ({**GOOD, "shape": None}, "is not a list of sizes"),
        ({**GOOD, "shape": [2**48]}, "is not a list of sizes"),
        ({**GOOD, "shape": [1] * 17}, "is not a list of sizes"),
        ({**GOOD, "shape": [2**47] * 16}, "does not take"),
        ({**GOOD, "data_offsets": [0, 8, 8]}, "are not two positions"),
        ({**GOOD, "data_offsets": [False, 8]}, "are not two positions"),
        ({**GOOD, "data_offsets": [-8, 0]}, "are not two positions"),
        ({**GOOD, "data_offsets": [0, 2**60]}, "are not two positions"),
        ({**GOOD, "data_offsets": [0.0, 8.0]}, "are not two positions"),
        ({**GOOD, "data_offsets": "08"}, "are not two positions"),
        ({**GOOD, "data_offsets": [8, 0]}, "does not take -8 bytes"),
        ([0, 8], "is not an object"),
        (None, "is not an object"),
    ],
)
def test_a_broken_entry_names_shard_tensor_and_fault(tmp_path: Path, entry: Any, message: str) -> None:
    text = _refused(_file(tmp_path / "x.safetensors", {"layer.weight": entry}, bytes(8)))
    assert f"x.safetensors: layer.weight: {message}" in text or (
        "x.safetensors: layer.weight: " in text and message in text
    )


@pytest.mark.parametrize(
    ("offsets", "payload", "message"),
    [
        ([(0, 8), (4, 12)], 12, "overlaps its neighbour"),
        ([(0, 8), (0, 8)], 8, "overlaps its neighbour"),
        ([(0, 8), (12, 20)], 20, "leaves a gap before it"),
        ([(8, 16)], 16, "leaves a gap before it"),
        ([(0, 8), (8, 16)], 15, "is truncated: headers describe"),
        ([(0, 8), (8, 16)], 0, "is truncated: headers describe"),
        ([(0, 8), (8, 16)], 17, "has bytes that no tensor owns"),
        ([], 1, "has bytes that no tensor owns"),
    ],
)
def test_data_must_tile_the_file(tmp_path: Path, offsets: list[tuple[int, int]], payload: int, message: str) -> None:
    header = {f"t{i}": {**GOOD, "data_offsets": list(pair)} for i, pair in enumerate(offsets)}
    assert message in _refused(_file(tmp_path / "x.safetensors", header, bytes(payload)))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"a": %s, "a": %s}' % ((json.dumps(GOOD).encode(),) * 2), "the key 'a' occurs twice"),
        (
            b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
            "the key 'dtype' occurs twice",
        ),
        (b'{"a": ', "not valid JSON"),
        (b"[]", "does not begin with {"),
        (b'  {"a": 1}', "does not begin with {"),
        (b"null", "does not begin with {"),
        (b"{" + b"\xff" * 8, "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"__metadata__": {"format": 1}}', "__metadata__ is not a map of strings"),
        (b'{"__metadata__": null}', "__metadata__ is not a map of strings"),
        (b'{"": {}}', "not a plausible tensor name"),
        (b'{"\\ud800": {}}', "not a plausible tensor name"),
        (b'{"a\\u001b[2J": {}}', "not a plausible tensor name"),
        (b'{"a\\nb": {}}', "not a plausible tensor name"),
        (b'{"a\\u0000": {}}', "not a plausible tensor name"),
    ],
)
def test_a_header_that_is_no_plain_json_object_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    assert message in _refused(_file(tmp_path / "x.safetensors", raw))


def test_all_faults_of_a_file_are_listed_at_once(tmp_path: Path) -> None:
    header = {f"t{i}": {**GOOD, "shape": [i]} for i in range(60) if i != 2}
    with pytest.raises(CheckpointError) as caught:
        read_header(_file(tmp_path / "x.safetensors", header, bytes(8)))
    assert len(caught.value.problems) == 59
    assert "and 9 more" in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_file_that_cannot_be_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.safetensors"
    if kind == "folder":
        path.mkdir()
    assert "directory" in _refused(path)


def _bytes_near_a_header() -> st.SearchStrategy[bytes]:
    size = st.integers(-2, 2**62) | st.booleans() | st.none() | st.floats() | st.text(max_size=3)
    entry = st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from([*DTYPE_BYTES, "X", "", "f32"]) | size,
            "shape": st.lists(size, max_size=4) | size,
            "data_offsets": st.lists(st.integers(-1, 64) | size, max_size=3) | size,
            "more": size,
        },
    )
    header = st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), entry | size, max_size=4)
    return st.builds(
        lambda value, pad, payload: (
            struct.pack("<Q", max(0, len(json.dumps(value).encode()) + pad)) + json.dumps(value).encode() + payload
        ),
        header,
        st.sampled_from([0, 0, 0, 1, -1, 7, 1000]),
        st.binary(max_size=64),
    )


@given(st.binary(max_size=80) | _bytes_near_a_header())
def test_any_bytes_give_a_header_or_a_checkpoint_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(data)
    try:
        tensors, _ = read_header(path)
    except CheckpointError as error:
        str(error).encode()
        return
    assert sum(t.bytes for t in tensors.values()) + 8 + struct.unpack("<Q", data[:8])[0] == len(data)


@given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 40))
def test_one_changed_byte_of_a_good_file(tmp_path: Path, at: int, byte: int, cut: int) -> None:
    path = tmp_path / "good.safetensors"
    write_safetensors(
        path, {"a.weight": ("F32", (2, 2), bytes(16)), "b": ("BF16", (3,), bytes(6)), "c": ("BF16", (), b"12")}
    )
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(bytes(data[: len(data) - cut]))
    try:
        tensors, _ = read_header(path)
    except CheckpointError:
        return
    position = 8 + struct.unpack("<Q", data[:8])[0]
    for tensor in sorted(tensors.values(), key=lambda t: t.start):
        assert tensor.start == position
        position = tensor.end
    assert position == len(data) - cut


@pytest.mark.parametrize("model_type", CONFIGS)
def test_headers_agree_with_the_safetensors_library(model_type: str, checkpoints: Callable[..., Path]) -> None:
    safetensors = pytest.importorskip("safetensors")
    folder = checkpoints(model_type)
    opened = Checkpoint.open(folder)
    seen = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(shard, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                seen[name] = (part.get_dtype(), tuple(part.get_shape()), shard.name)
    assert {t.name: (t.dtype, t.shape, t.shard) for t in opened.tensors.values()} == seen


def test_offsets_find_the_stored_bytes(checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints("qwen3_5", float32_state=True)
    stored = read_raw(folder)
    for tensor in Checkpoint.open(folder).tensors.values():
        with (folder / tensor.shard).open("rb") as file:
            file.seek(tensor.start)
            assert file.read(tensor.bytes) == stored[tensor.name][2]


# The folder: index, shards, side files.


@pytest.fixture
def folder(tmp_path: Path, checkpoints: Callable[..., Path]) -> Path:
    """A copy of a two-shard checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoints("qwen3_5", layers=1, vision=False), tmp_path / "model"))


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _open_fails(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    text = str(caught.value)
    text.encode()
    return text


def _edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_a_sound_folder_opens_sorted_and_consistent(folder: Path) -> None:
    opened = Checkpoint.open(folder)
    assert opened.inconsistencies == ()
    assert list(opened.tensors) == sorted(read_raw(folder))
    assert set(opened.shards) == {FIRST, SECOND}
    assert opened.text_config["hidden_size"] == 256
    assert opened.fingerprint().keys() == {FIRST, SECOND}
    assert opened.fingerprint()[FIRST][0] == (folder / FIRST).stat().st_size


@pytest.mark.parametrize(
    "target",
    [
        "../model.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", "model.safetensors/", "..", "", 5,
        None, ["x"], "a\0.safetensors", "a\nb.safetensors",
    ],
)  # fmt: skip
def test_a_weight_map_may_not_leave_the_folder(folder: Path, target: Any) -> None:
    _edit_index(folder, lambda index: index["weight_map"].update({"lm_head.weight": target}))
    text = _open_fails(folder)
    assert "leaves the folder" in text
    assert "'lm_head.weight': the index points to" in text


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_half_a_character_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text(path.read_text().replace("{", '{"note": "\\ud800", ', 1))
    assert "surrogates not allowed" in _open_fails(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / SECOND).unlink()
    text = _open_fails(folder)
    assert SECOND in text
    assert "No such file" in text


def test_every_unreadable_shard_is_named(folder: Path) -> None:
    (folder / FIRST).write_bytes(b"")
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 2)
    text = _open_fails(folder)
    assert f"{FIRST}: 0 bytes is too short" in text
    assert f"{SECOND}: is truncated" in text


def test_index_and_shards_must_agree_and_every_difference_is_listed(folder: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        weight_map = index["weight_map"]
        weight_map.pop("lm_head.weight")
        weight_map["ghost.weight"] = FIRST
        weight_map["mtp.norm.weight"] = FIRST if weight_map["mtp.norm.weight"] == SECOND else SECOND

    _edit_index(folder, change)
    shutil.copy(folder / SECOND, folder / "stray.safetensors")
    text = _open_fails(folder)
    assert "lm_head.weight: stored in" in text
    assert "ghost.weight: the index places it in" in text
    assert "mtp.norm.weight: the index places it in" in text
    assert "stray.safetensors: a shard that the index does not name" in text
    lenient = Checkpoint.open(folder, strict=False)
    assert len(lenient.inconsistencies) == 4
    assert "lm_head.weight" in lenient.tensors


def test_a_tensor_stored_in_two_shards_is_refused(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / FIRST).rename(folder / "a.safetensors")
    (folder / SECOND).rename(folder / "b.safetensors")
    assert Checkpoint.open(folder).tensors
    shutil.copy(folder / "a.safetensors", folder / "c.safetensors")
    assert "stored twice, in a.safetensors and in c.safetensors" in _open_fails(folder)


def test_a_missing_shard_shows_without_an_index_too(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / FIRST).unlink()
    assert "1 shards without an index, whose names speak of 2" in _open_fails(folder)


def test_a_folder_without_index_reads_every_shard(folder: Path) -> None:
    whole = Checkpoint.open(folder)
    (folder / INDEX).unlink()
    assert Checkpoint.open(folder).tensors == whole.tensors
    assert Checkpoint.open(folder).header_digest == whole.header_digest


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": null}'])
def test_an_index_without_weight_map_is_refused(folder: Path, index: str) -> None:
    (folder / INDEX).write_text(index)
    assert "no weight_map" in _open_fails(folder)


def test_an_index_that_names_a_tensor_twice_is_refused(folder: Path) -> None:
    (folder / INDEX).write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}')
    assert "the key 'a' occurs twice" in _open_fails(folder)


def test_pickle_files_are_never_opened(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {})
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    text = _open_fails(tmp_path)
    assert "no *.safetensors file (found pytorch_model.bin: pickle files are never opened)" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.json:1:1"),
        ("{", "config.json:1:2"),
        ("[]", "a JSON object is needed, found list"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"a": ' + "1" * 5000 + "}", "not readable as JSON"),
    ],
)
def test_a_broken_config_is_located(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert message in _open_fails(tmp_path)


def test_a_config_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        read_json(tmp_path / "config.json")


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert "no such folder" in _open_fails(tmp_path / "nowhere")
    assert "No such file" in _open_fails(tmp_path)


@given(data=st.binary(max_size=60))
def test_any_config_bytes_give_an_object_or_a_checkpoint_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    try:
        value = read_json(tmp_path / "config.json")
    except CheckpointError as error:
        str(error).encode()
        return
    assert isinstance(value, dict)


def test_header_digest_tells_checkpoints_apart_but_not_their_folders(folder: Path, tmp_path: Path) -> None:
    digest = Checkpoint.open(folder).header_digest
    assert Checkpoint.open(Path(shutil.copytree(folder, tmp_path / "copy"))).header_digest == digest
    tensors = read_raw(folder)
    dtype, shape, raw = tensors["mtp.norm.weight"]
    tensors["mtp.norm.weight"] = ("F16", shape, raw)
    assert dtype == "BF16"
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write_safetensors(folder / "model.safetensors", tensors)
    assert Checkpoint.open(folder).header_digest != digest


def test_side_files_are_everything_but_weights_index_and_config(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "vocab.txt").write_text("x")
    (folder / "sub" / "config.json").write_text("{}")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("x")
    (folder / ".hidden").write_text("x")
    for name in ("consolidated.pth", "model.gguf", "optimizer.pt", "pytorch_model.bin.index.json"):
        (folder / name).write_text("x")
    assert Checkpoint.open(folder).side_files() == [
        "LICENSE", "README.md", "chat_template.jinja", "generation_config.json", "sub/config.json", "sub/vocab.txt",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["config.json", INDEX, "model.safetensors"])
def test_pipes_and_devices_are_refused_instead_of_read(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": "qwen3_5_text"})
    _file(folder / "model.safetensors", {"a": GOOD}, bytes(8))
    assert Checkpoint.open(folder).tensors
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=r"not a regular file|unreadable shards"):
        Checkpoint.open(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"not a regular file|unreadable shards"):
        Checkpoint.open(folder)


def test_a_file_that_grows_beyond_all_measure_is_read_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkquant.checkpoint.MAX_JSON_BYTES", 100)
    (tmp_path / "config.json").write_text('{"a": "' + "x" * 100 + '"}')
    with pytest.raises(CheckpointError, match="plausible JSON"):
        read_json(tmp_path / "config.json")


def test_names_with_absurd_numbers_are_refused(tmp_path: Path) -> None:
    path = _file(tmp_path / "x.safetensors", {f"model.layers.{'1' * 5000}.mlp.down_proj.weight": GOOD}, bytes(8))
    assert "not a plausible tensor name" in _refused(path)


@pytest.mark.parametrize("path", ["~nosuch-user/x", "x" * 300, "a\0b"])
def test_a_path_that_cannot_be_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError):
        locate(path)
    with pytest.raises(UsageError):
        as_path(path)


@pytest.mark.parametrize("out", ["/", 3, None, " "])
def test_an_output_that_is_no_new_folder_is_refused(out: Any) -> None:
    with pytest.raises(UsageError):
        as_path(out)


def test_a_linked_folder_is_listed_and_pickles_of_any_spelling_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": "qwen3_5_text"})
    _file(folder / "model.safetensors", {"a": GOOD}, bytes(8))
    (tmp_path / "elsewhere").mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    for name in ("a.PT", "b.pickle", "c.Bin"):
        (folder / name).write_bytes(b"")
    assert Checkpoint.open(folder).side_files() == ["linked"]


@pytest.mark.parametrize("dtype", ["float16", "half", "torch.float16", "torch.half"])
@pytest.mark.parametrize("inner", [False, True])
def test_float16_is_known_in_every_spelling_and_place(dtype: str, inner: bool, tmp_path: Path) -> None:
    config = {"dtype": "bfloat16", "text_config": {"torch_dtype": dtype}} if inner else {"torch_dtype": dtype}
    write_json(tmp_path / "config.json", config)
    _file(tmp_path / "model.safetensors", {"a": GOOD}, bytes(8))
    assert Checkpoint.open(tmp_path).float16
