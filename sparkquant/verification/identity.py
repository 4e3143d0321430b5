"""config.json and side files against the source, and the token ids that several files repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sparkquant.checkpoint import Checkpoint
from sparkquant.report import Check
from sparkquant.verification.catalogue import finding
from sparkquant.verification.folder import side_json
from sparkquant.verification.subject import Subject, readable

ALLOWED = frozenset({"quantization_config", "transformers_version", "_name_or_path"})
"""Top-level fields of config.json that may differ from the source."""

REQUIRED = (
    "tokenizer*", "chat_template*", "*.jinja", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Side files that a result must carry over (names, at any depth)."""

CHUNK_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 100_000_000


def check_identity(subject: Subject) -> Iterator[Check]:
    """tokens.*, source.config and source.files_*"""
    yield from _tokens(subject)
    if subject.source is None:
        return
    differing = list(_config_differences(subject.config, subject.source.config))
    if differing:
        yield finding("source.config", f"fields differ from the source: {differing[0]}", differing)
    missing, unlike = _side_files(subject.source, subject.path)
    if missing:
        yield finding("source.files_missing", "files of the source are absent", missing)
    if unlike:
        yield finding("source.files_differ", "files differ from the source", unlike)


def _config_differences(config: Mapping[str, Any], source: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(config.keys() | source.keys()):
        if key in ALLOWED:
            continue
        mine, theirs = config.get(key, _ABSENT), source.get(key, _ABSENT)
        if _same(mine, theirs):
            continue
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            keys = mine.keys() | theirs.keys()
            inner = [k for k in keys if not _same(mine.get(k, _ABSENT), theirs.get(k, _ABSENT))]
            yield from (f"{key}.{name}" for name in sorted(map(str, inner)))
        else:
            yield key


_ABSENT = object()


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1, 1.0 and true are three things, NaN is itself."""
    if a is _ABSENT or b is _ABSENT:
        return a is b
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def is_required(name: str) -> bool:
    """Whether a result must carry over a side file of this name."""
    return any(fnmatchcase(name.rpartition("/")[2], pattern) for pattern in REQUIRED)


def _side_files(source: Checkpoint, folder: Path) -> tuple[list[str], list[str]]:
    missing: list[str] = []
    unlike: list[str] = []
    for name in source.side_files():
        original = source.path / name
        if name.startswith("sparkquant/") or not is_required(name):
            continue
        if not readable(original, source.path):
            continue
        if not readable(folder / name, folder):
            missing.append(name)
        elif not _equal_files(original, folder / name):
            unlike.append(name)
    return missing, unlike


def _equal_files(a: Path, b: Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as one, b.open("rb") as two:
        while True:
            first, second = one.read(CHUNK_BYTES), two.read(CHUNK_BYTES)
            if first != second:
                return False
            if not first:
                return True


def _tokens(subject: Subject) -> Iterator[Check]:
    ids = _TokenIds(subject.path, subject.config)
    original = _TokenIds(subject.source.path, subject.source.config) if subject.source is not None else None
    if ids.end is not None and ids.stops and ids.end not in ids.stops:
        inherited = original is not None and original.end == ids.end and original.stops == ids.stops
        what = f"the tokenizer ends a turn with {ids.end}, generation stops at {sorted(ids.stops)}: it will not end"
        yield finding("tokens.eos", what, measured=sorted(ids.stops), expected=ids.end, inherited=inherited)
    for kind in ("pad", "bos"):
        found = ids.single(kind)
        if len(found) > 1 and (original is None or original.single(kind) != found):
            yield finding("tokens.pad_bos", f"{kind} ids disagree: {sorted(found)}", measured=sorted(found))
    if original is not None and original.declared != ids.declared:
        what = f"{_shown(ids.declared)}; the source has {_shown(original.declared)}"
        yield finding("tokens.source", what)


def _shown(declared: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={str(value)[:60]}" for key, value in declared.items()) or "none"


class _TokenIds:
    """The ids that config.json, generation_config.json and the tokenizer state."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        text = config.get("text_config")
        generation, _ = side_json(folder, "generation_config.json")
        self._tokenizer, _ = side_json(folder, "tokenizer_config.json")
        self.declared: dict[str, Any] = {}
        for where, fields in (("config", config), ("text_config", text), ("generation_config", generation)):
            for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
                if isinstance(fields, Mapping) and fields.get(key) is not None:
                    self.declared[f"{where}.{key}"] = fields[key]
        self._folder = folder
        self.end = self._token("eos")
        self.stops = self._ids("generation_config.eos_token_id") or self._ids("config.eos_token_id")
        self.stops = self.stops or self._ids("text_config.eos_token_id")

    def _ids(self, key: str) -> frozenset[int]:
        value = self.declared.get(key)
        values = value if isinstance(value, list) else [value]
        return frozenset(item for item in values if type(item) is int)

    def single(self, kind: str) -> set[int]:
        """All ids that are stated for `pad` or `bos`."""
        found = {id for key in self.declared if key.endswith(f"{kind}_token_id") for id in self._ids(key)}
        token = self._token(kind)
        return found | ({token} if token is not None else set())

    def _token(self, kind: str) -> int | None:
        name = self._tokenizer.get(f"{kind}_token")
        name = name.get("content") if isinstance(name, Mapping) else name
        if not isinstance(name, str):
            return None
        decoder = self._tokenizer.get("added_tokens_decoder")
        for id, entry in decoder.items() if isinstance(decoder, Mapping) else ():
            if isinstance(entry, Mapping) and entry.get("content") == name and id.isdecimal() and len(id) < 10:
                return int(id)
        return next((id for content, id in _added_tokens(self._folder) if content == name), None)


def _added_tokens(folder: Path) -> Iterator[tuple[str, int]]:
    """`added_tokens` of tokenizer.json, without parsing the vocabulary behind them."""
    path = folder / "tokenizer.json"
    if not readable(path, folder) or path.stat().st_size > MAX_TOKENIZER_BYTES:
        return
    with path.open("rb") as file:
        head = file.read(4 * CHUNK_BYTES).decode("utf-8", "replace")
    start = head.find('"added_tokens"')
    start = head.find("[", start) if start >= 0 else -1
    if start < 0:
        return
    try:
        tokens, _ = json.JSONDecoder().raw_decode(head, start)
    except (ValueError, RecursionError):
        return
    for token in tokens:
        if isinstance(token, Mapping) and isinstance(token.get("content"), str) and type(token.get("id")) is int:
            yield token["content"], token["id"]
