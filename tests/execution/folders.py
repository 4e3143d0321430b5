"""What the execution tests ask of folders."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by relative path; evidence, which states a date, and the card left out."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "evidence" and path.name != "README.md"
    }
