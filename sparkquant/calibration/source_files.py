"""What a source of a mix holds: its files found and read, each item with its place, each fault with its reason."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from sparkquant.calibration.conversation import Dropped, Item, Passage, Reason, Unusable
from sparkquant.calibration.dialects import item_of
from sparkquant.calibration.jsonl import read_records
from sparkquant.calibration.mix import Mix, Source
from sparkquant.calibration.mix_files import load_mix
from sparkquant.errors import CalibrationError

MAX_TEXT_BYTES = 4_000_000
"""A larger text file is a dump or generated, and would be one row among hundreds anyway."""

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json")
"""What is read when `conversations` names a folder."""

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})


def read_source(mix: Mix, name: str) -> Iterator[Item | Dropped]:
    """Every item of one source."""
    source = mix.sources[name]
    if source.kind == "conversations":
        for path, place in find_files(mix, name, source.conversations):
            yield from _conversations(path, place)
    elif source.kind == "text":
        for path, place in find_files(mix, name, source.text):
            yield _passage(path, place, source)
    else:
        from sparkquant.calibration.tables import read_table

        files = [path for path, _ in find_files(mix, name, source.table)] if source.kind == "table" else []
        yield from read_table(name, source, files)


def files_of(spec: str | os.PathLike[str]) -> Iterator[Path]:
    """The files that a path leads to: itself, and for a mix those of its sources that are there."""
    mix = load_mix(spec)
    yield Path(spec).expanduser()
    for source in mix.sources.values():
        for pattern in (*source.conversations, *source.text, *source.table):
            yield from _chosen(mix, source, pattern)


def find_files(mix: Mix, name: str, patterns: tuple[str, ...]) -> list[tuple[Path, str]]:
    """(file, its name relative to the mix) for paths, folders and globs, sorted; CalibrationError when one is empty."""
    found: dict[Path, str] = {}
    for pattern in patterns:
        paths = _chosen(mix, mix.sources[name], pattern)
        if not paths:
            raise CalibrationError(
                f"{mix.source}: source {name!r}: {pattern} names no file",
                hint=f"paths start at {mix.folder}; `**` crosses folders, hidden folders are skipped",
            )
        found |= {path: _place(path, mix.folder) for path in paths}
    return sorted(found.items(), key=lambda entry: entry[1])


def _chosen(mix: Mix, source: Source, pattern: str) -> list[Path]:
    suffixes = RECORD_SUFFIXES if source.kind == "conversations" else ()
    excluded = {path for other in source.exclude for path in _matches(mix.folder, other, ())}
    return [path for path in _matches(mix.folder, pattern, suffixes) if path not in excluded]


def _matches(folder: Path, pattern: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Files of one pattern. A named file is taken as it is; what a folder or a glob brings must be visible."""
    where = Path(pattern).expanduser()
    # Path.glob walks hidden folders, whole virtual environments among them.
    whole = where if where.is_absolute() else Path(glob.escape(str(folder))) / where
    entries = [Path(match) for match in glob.glob(str(whole), recursive=True)]  # noqa: PTH207
    root = folder.joinpath(*itertools.takewhile(lambda part: not glob.has_magic(part), where.parts[:-1]))
    if len(entries) == 1 and entries[0].is_dir():
        root = entries[0]
        entries = [path for path in root.rglob("*") if not suffixes or path.suffix in suffixes]
        entries = [path for path in entries if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    return [
        path for path in entries if path.is_file() and not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]


def _place(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _conversations(path: Path, place: str) -> Iterator[Item | Dropped]:
    for record in read_records(path, place):
        if isinstance(record, Dropped):
            yield record
            continue
        where, value = record
        try:
            yield item_of(value, where)
        except Unusable as fault:
            yield Dropped(where, fault.reason, fault.what)
        except RecursionError:
            yield Dropped(where, Reason.NOT_A_CONVERSATION, "nested too deeply")


def _passage(path: Path, place: str, source: Source) -> Item | Dropped:
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            return Dropped(place, Reason.UNREADABLE, f"more than {MAX_TEXT_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        return Dropped(place, Reason.UNREADABLE, str(error.strerror or error))
    except UnicodeDecodeError:
        return Dropped(place, Reason.NOT_UTF8, "not UTF-8 text")
    if not text.strip() or "\0" in text:
        return Dropped(place, Reason.EMPTY if not text.strip() else Reason.NOT_TEXT, "no text")
    user, assistant = (source.wrap.user, source.wrap.assistant) if source.wrap else ("", "")
    return Passage(place, text, path=place, user=user, assistant=assistant)
