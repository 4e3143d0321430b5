"""Records of a JSONL file (or of a JSON list) with their places; faulty lines are told, not fatal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from sparkquant.calibration.conversation import Dropped, Reason

MAX_LINE_CHARS = 32 * 1024 * 1024
"""No conversation that a model can read is longer; a longer line is a broken file, and is not held in memory."""

MAX_JSON_BYTES = 1_000_000_000


def read_records(path: Path, name: str) -> Iterator[tuple[str, Any] | Dropped]:
    """(place, record) for each record of the file, Dropped for each line that is none. `name` stands for the file."""
    try:
        if path.suffix == ".json":
            yield from _read_list(path, name)
        else:
            with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
                yield from _read_lines(file, name)
    except OSError as error:
        yield Dropped(name, Reason.UNREADABLE, str(error.strerror or error))


def _read_lines(file: TextIO, name: str) -> Iterator[tuple[str, Any] | Dropped]:
    number = 0
    while line := file.readline(MAX_LINE_CHARS):
        number += 1
        where = f"{name}:{number}"
        if len(line) == MAX_LINE_CHARS and not line.endswith("\n"):
            while (rest := file.readline(MAX_LINE_CHARS)) and not rest.endswith("\n"):
                pass
            yield Dropped(where, Reason.LINE_TOO_LONG, f"more than {MAX_LINE_CHARS:,} characters")
        elif line.strip():
            yield _parse(line, where)


def _parse(line: str, where: str) -> tuple[str, Any] | Dropped:
    try:
        line.encode()
        return where, json.loads(line)
    except UnicodeEncodeError:
        return Dropped(where, Reason.NOT_UTF8, "bytes that are not UTF-8")
    except json.JSONDecodeError as error:
        return Dropped(where, Reason.INVALID_JSON, f"column {error.colno}: {error.msg}")
    except (ValueError, RecursionError):
        return Dropped(where, Reason.INVALID_JSON, "nested too deeply, or a number without end")


def _read_list(path: Path, name: str) -> Iterator[tuple[str, Any] | Dropped]:
    if path.stat().st_size > MAX_JSON_BYTES:
        yield Dropped(name, Reason.UNREADABLE, f"more than {MAX_JSON_BYTES:,} bytes: write one record a line as .jsonl")
        return
    parsed = _parse(path.read_text(encoding="utf-8-sig", errors="surrogateescape"), name)
    if isinstance(parsed, Dropped):
        yield parsed
        return
    records = parsed[1] if isinstance(parsed[1], list) else [parsed[1]]
    for number, record in enumerate(records, 1):
        yield f"{name}[{number}]", record
