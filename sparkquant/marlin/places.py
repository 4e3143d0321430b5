"""Where logs and records go. What cannot be written is told before a run, not after hours of it."""

from __future__ import annotations

import os
from pathlib import Path

from sparkquant.errors import UsageError

HINT = "choose another place"


def place_beside(folder: Path, name: str) -> Path:
    """A place of that name beside a checkpoint; here, where the checkpoint lies in the hub's cache."""
    cached = folder.resolve().parent.name == "snapshots"
    return Path.cwd() / name if cached else folder.with_name(name)


def writable_folder(folder: Path) -> Path:
    """The folder, made where it is missing. Raises UsageError where nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}", hint=HINT) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: cannot be written", hint=HINT)
    return folder


def writable_file(file: Path) -> Path:
    """The file, whose content is left alone. Raises UsageError where it cannot be written."""
    if file.is_dir():
        raise UsageError(f"{file} is a folder", hint="name a file")
    parent = file.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{file}: there is no folder {parent}", hint=HINT)
    if not os.access(file if file.exists() else parent, os.W_OK):
        raise UsageError(f"{file}: cannot be written", hint=HINT)
    return file
