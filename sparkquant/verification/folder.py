"""Checks of the folder itself: index and shards, pickles, links, side files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkquant.checkpoint import PICKLES, read_json
from sparkquant.errors import CheckpointError
from sparkquant.report import Check
from sparkquant.verification.catalogue import finding
from sparkquant.verification.subject import Subject, readable

MAX_FILES = 100_000
JSON_FILES = ("generation_config.json", "tokenizer_config.json")


def check_folder(subject: Subject) -> Iterator[Check]:
    """files.* without a source."""
    faults = subject.checkpoint.inconsistencies
    if faults:
        yield finding(
            "files.index",
            f"index and shards disagree: {faults[0].what}",
            [fault.where for fault in faults],
        )
    files = list(_files(subject.path))
    pickles = [name for name in files if Path(name).suffix in PICKLES]
    if pickles:
        yield finding("files.pickle", "pickle files run code when they are opened; none belongs here", pickles)
    links = [name for name in files if _leaves(subject.path, name)]
    if links:
        yield finding("files.link", "links lead out of the folder, or devices lie in it: they are not read", links)
    yield from _missing(subject)
    broken = [f"{name}: {fault}" for name in JSON_FILES if (fault := side_json(subject.path, name)[1])]
    if broken:
        yield finding("files.json", "side files cannot be read", broken)


def _files(folder: Path) -> Iterator[str]:
    count = 0
    for root, folders, files in os.walk(folder):
        folders.sort()
        links = [name for name in folders if Path(root, name).is_symlink()]
        for name in [*sorted(files), *links]:
            yield Path(root, name).relative_to(folder).as_posix()
            count += 1
            if count >= MAX_FILES:
                return


def _leaves(folder: Path, name: str) -> bool:
    path = folder / name
    if path.is_symlink() and path.is_dir():
        return folder.resolve() not in path.resolve().parents
    return not readable(path, folder)


def _missing(subject: Subject) -> Iterator[Check]:
    def absent(*names: str) -> bool:
        return not any((subject.path / name).exists() for name in names)

    missing = []
    if absent("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model"):
        missing.append("tokenizer.json")
    if isinstance(subject.config.get("vision_config"), dict) and absent(
        "preprocessor_config.json", "processor_config.json"
    ):
        missing.append("preprocessor_config.json")
    if missing:
        yield finding("files.missing", "an engine needs these files beside the weights", missing)


def side_json(folder: Path, name: str) -> tuple[dict[str, Any], str]:
    """A JSON side file and a fault; both empty when there is none."""
    path = folder / name
    if not readable(path, folder):
        return {}, ""
    try:
        return read_json(path), ""
    except CheckpointError as error:
        return {}, error.what
