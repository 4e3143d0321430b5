"""The read side of a checkpoint folder: headers, weight map, side files. Reads headers without torch.

A folder from somewhere else is hostile until proven otherwise: sizes are checked before anything is allocated, names in
the index may not leave the folder, and pickle files are never opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sparkquant.errors import CheckpointError, Problem
from sparkquant.schemes import DTYPE_BYTES

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself; a longer header is an attack or garbage."""

MAX_JSON_BYTES = 200_000_000
"""config.json and the index of any real checkpoint are far below this."""

_HUGE_NUMBER = re.compile(r"\d{10}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as a shard's header states it; `start` and `end` are absolute file offsets in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    end: int

    @property
    def bytes(self) -> int:
        """Payload in bytes."""
        return self.end - self.start

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _require_regular(path: Path) -> int:
    """The size of a regular file: a pipe would wait for a writer, a device never ends."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        what = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe or device"
        raise CheckpointError(f"{path}: not a regular file but {what}", hint="replace it by a copy of the real file")
    return found.st_size


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError with the place when it is not one."""
    hint = "fetch the file again, or repair it"
    try:
        _require_regular(path)
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
        if len(raw) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: more than {MAX_JSON_BYTES:,} bytes is no plausible JSON file", hint=hint)
        text = raw.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique_keys)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # half a character cannot be written again
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}", hint="is this a checkpoint folder?") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}:{error.lineno}:{error.colno}: {error.msg}", hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}", hint=hint) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is needed, found {type(value).__name__}", hint=hint)
    return value


def read_header(path: Path) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    """Tensors and metadata of one safetensors file, with every offset checked.

    Raises CheckpointError listing all faults of the file: a header that is too long or not JSON, unknown dtypes, shapes
    that do not fit their bytes, offsets that overlap, leave gaps or leave the file.
    """
    try:
        size = _require_regular(path)
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _broken(path, f"{size} bytes is too short for a safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES or length > size - 8:
                raise _broken(path, f"the header claims {length:,} bytes, the file has {size:,}")
            raw = file.read(length)
    except OSError as error:
        raise _broken(path, str(error.strerror or error)) from None
    if not raw.startswith(b"{"):
        raise _broken(path, "the header does not begin with {, which safetensors readers demand")
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"the header is not valid JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _broken(path, "the header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    tensors, problems = _tensors(path.name, entries, 8 + length, size)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        problems.append(Problem(path.name, "__metadata__ is not a map of strings"))
    if problems:
        raise CheckpointError(f"{path}: broken safetensors header", hint="fetch the shard again", problems=problems)
    return tensors, metadata


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", hint="fetch the shard again; it is truncated or not a safetensors file")


def _tensors(
    shard: str, entries: Mapping[str, Any], base: int, size: int
) -> tuple[dict[str, TensorHeader], list[Problem]]:
    found: dict[str, TensorHeader] = {}
    problems: list[Problem] = []
    for name, entry in entries.items():
        header = _tensor(shard, name, entry, base)
        if isinstance(header, Problem):
            problems.append(header)
        else:
            found[name] = header
    position = base
    for header in sorted(found.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if header.start != position:
            fault = "overlaps its neighbour" if header.start < position else "leaves a gap before it"
            problems.append(Problem(f"{shard}: {header.name}", f"its data {fault}"))
        position = max(position, header.end)
    if not problems and position != size:
        fault = "is truncated" if position > size else "has bytes that no tensor owns"
        problems.append(Problem(shard, f"{fault}: headers describe {position:,} bytes, the file has {size:,}"))
    return found, problems


def _tensor(shard: str, name: str, entry: Any, base: int) -> TensorHeader | Problem:
    where = f"{shard}: {name}"
    if not name.isprintable() or not name or len(name) > 1000 or _HUGE_NUMBER.search(name):
        return Problem(f"{shard}: {name[:80]!a}", "not a plausible tensor name")
    if not isinstance(entry, dict):
        return Problem(where, "its header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        return Problem(where, f"unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > 16 or not all(type(d) is int and 0 <= d < 2**48 for d in shape):
        return Problem(where, f"shape {str(shape)[:80]} is not a list of sizes")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(o) is int and 0 <= o < 2**60 for o in offsets)
    ):
        return Problem(where, f"data_offsets {str(offsets)[:80]} are not two positions")
    start, end = offsets
    if end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        return Problem(where, f"{dtype} {shape} does not take {end - start:,} bytes")
    return TensorHeader(name, dtype, tuple(shape), shard, base + start, base + end)


@dataclass(frozen=True)
class Computed:
    """A tensor that no file holds as it is: `load(first, last)` gives its rows as float32.

    label, bits, method  the scheme that it is stored in, and the `quant_method` of the config
    """

    label: str
    bits: int
    method: str
    load: Callable[[int, int | None], Any]


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and safetensors shards, opened by its headers alone.

    inconsistencies  where index and shards disagree: refused by plan and quantize, reported by verify
    computed         of a quantized source seen in 16 bits (`sparkquant.requantizing`): what is dequantized when read
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader]
    shards: Mapping[str, Mapping[str, TensorHeader]]
    inconsistencies: tuple[Problem, ...]
    computed: Mapping[str, Computed] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, strict: bool = True) -> Checkpoint:
        """Read config, index and all headers. With `strict`, an index that disagrees with its shards is an error."""
        try:
            return cls._open(Path(path), strict=strict)
        except OSError as error:
            raise CheckpointError(
                f"{os.fspath(path)}: {error.strerror or error}", hint="is this a checkpoint folder that you may read?"
            ) from None

    @classmethod
    def _open(cls, folder: Path, *, strict: bool) -> Checkpoint:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder", hint="pass a folder with config.json and *.safetensors")
        config = read_json(folder / "config.json")
        weight_map, problems = _weight_map(folder)
        shards, broken = _read_shards(folder, sorted(set(weight_map.values()) if weight_map else _loose_shards(folder)))
        if broken:
            raise CheckpointError(f"{folder}: unreadable shards", hint="fetch them again", problems=broken)
        tensors = {name: header for shard in shards.values() for name, header in shard.items()}
        problems += _index_faults(folder, weight_map, shards)
        if problems and strict:
            raise CheckpointError(
                f"{folder}: the index and the shards disagree",
                hint="fetch the checkpoint again, or run `sparkquant verify` for all findings",
                problems=problems,
            )
        return cls(folder, config, dict(sorted(tensors.items())), shards, tuple(problems))

    @cached_property
    def text_config(self) -> Mapping[str, Any]:
        """The language part of a multimodal config, or the config itself."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, Mapping) else self.config

    @cached_property
    def float16(self) -> bool:
        """Whether config.json asks for float16, in any spelling and for any of its parts that loaders ask."""
        asked = [part.get(key) for part in (self.config, self.text_config) for key in ("dtype", "torch_dtype")]
        return any(isinstance(dtype, str) and dtype.removeprefix("torch.") in ("float16", "half") for dtype in asked)

    @cached_property
    def header_digest(self) -> str:
        """sha256 over names, dtypes, shapes and shard places: which checkpoint this is, not what its weights are."""
        lines = [f"{t.name} {t.dtype} {list(t.shape)} {t.shard} {t.start}" for t in self.tensors.values()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def fingerprint(self) -> dict[str, list[int]]:
        """Size in bytes and modification time of every shard: changes when someone rewrites the source."""
        stats = {shard: (self.path / shard).stat() for shard in self.shards}
        return {shard: [stat.st_size, stat.st_mtime_ns] for shard, stat in sorted(stats.items())}

    def side_files(self) -> list[str]:
        """Everything that is neither weights nor index, relative to the folder, sorted; hidden files stay out."""
        return sorted(_side_files(self.path))


def _weight_map(folder: Path) -> tuple[dict[str, str], list[Problem]]:
    if not (folder / INDEX).exists():
        return {}, []
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: no weight_map", hint="fetch the index again")
    outside = [
        Problem(f"{name!a}", f"the index points to {str(shard)!r}, which is no shard name of this folder")
        for name, shard in weight_map.items()
        if not isinstance(shard, str)
        or not (name + shard).isprintable()
        or Path(shard).name != shard
        or not shard.endswith(".safetensors")
    ]
    if outside:
        raise CheckpointError(
            f"{folder / INDEX}: the weight_map leaves the folder or names other files",
            hint="do not use this checkpoint: a weight_map names plain *.safetensors files beside it",
            problems=outside,
        )
    return weight_map, []


def _loose_shards(folder: Path) -> list[str]:
    names = [entry.name for entry in folder.iterdir() if entry.suffix == ".safetensors"]
    names = [name for name in names if not _is_other_form(name)] or names
    if not names:
        pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in PICKLES)
        found = f" (found {', '.join(pickles[:3])}: pickle files are never opened)" if pickles else ""
        raise CheckpointError(f"{folder}: no *.safetensors file{found}", hint="convert the checkpoint to safetensors")
    counts = {int(match[1]) for name in names if (match := re.search(r"-of-(\d{1,9})\.safetensors$", name, re.ASCII))}
    if counts and counts != {len(names)}:
        what = f"{len(names)} shards without an index, whose names speak of {max(counts)}"
        raise CheckpointError(f"{folder}: {what}", hint="fetch the checkpoint again: a part of it is missing")
    return names


def _is_other_form(name: str) -> bool:
    """The same weights again under the vendor's own names, which loaders of this form never open."""
    return re.fullmatch(r"consolidated(?:[-.].*)?\.safetensors", name) is not None


def _read_shards(folder: Path, names: list[str]) -> tuple[dict[str, dict[str, TensorHeader]], list[Problem]]:
    shards: dict[str, dict[str, TensorHeader]] = {}
    broken: list[Problem] = []
    for name in names:
        try:
            shards[name] = read_header(folder / name)[0]
        except CheckpointError as error:
            broken += error.problems or [Problem("", error.what)]
    return shards, broken


def _index_faults(
    folder: Path, weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, TensorHeader]]
) -> list[Problem]:
    problems: list[Problem] = []
    owner: dict[str, str] = {}
    for shard, tensors in shards.items():
        for name in tensors:
            if name in owner:
                problems.append(Problem(name, f"stored twice, in {owner[name]} and in {shard}"))
            owner[name] = shard
    if not weight_map:
        return problems
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            problems.append(Problem(name, f"the index places it in {shard}, which does not hold it"))
    problems += [
        Problem(name, f"stored in {owner[name]} but absent from the index") for name in owner if name not in weight_map
    ]
    unlisted = sorted({e.name for e in folder.iterdir() if e.suffix == ".safetensors"} - set(shards))
    problems += [Problem(name, "a shard that the index does not name") for name in unlisted if not _is_other_form(name)]
    return problems


def _side_files(folder: Path) -> Iterator[str]:
    def unreadable(error: OSError) -> None:
        raise CheckpointError(f"{error.filename}: {error.strerror}", hint="make the folder readable, or remove it")

    for root, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        # A linked folder is not entered: it is listed as what it is, and whoever copies side files refuses it.
        for name in [*files, *(name for name in folders if Path(root, name).is_symlink())]:
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            weights = (
                path.suffix in (".safetensors", ".gguf")
                or path.suffix.lower() in PICKLES
                or name.endswith(".index.json")
            )
            if not name.startswith(".") and not weights and relative != "config.json":
                yield relative
