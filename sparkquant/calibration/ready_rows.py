"""Rows that someone tokenized already: a JSON file with a list of lists of token ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sparkquant.calibration.jsonl import MAX_JSON_BYTES
from sparkquant.calibration.rows import Row
from sparkquant.errors import CalibrationError, Problem

NAME = "token-ids"
"""How such rows are called in records."""

HINT = "ready rows are a JSON list of lists of token ids, such as [[1, 5, 2], [1, 7, 2]]"


def read_ready_rows(path: Path) -> list[Any] | None:
    """The lists of the file; None when it holds a list of something else, such as conversations."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CalibrationError(f"{path}: more than {MAX_JSON_BYTES:,} bytes", hint="take fewer rows")
        rows = json.loads(path.read_bytes())
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror or error}", hint="check the path") from None
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{path}: not readable as JSON: {str(error)[:200]}", hint=HINT) from None
    if isinstance(rows, list) and rows and not isinstance(rows[0], list):
        return None
    if not isinstance(rows, list) or not rows:
        raise CalibrationError(f"{path}: no list of rows", hint=HINT)
    return rows


def ready_rows(rows: list[Any], path: Path, *, count: int, tokens: int, vocabulary: int) -> list[Row]:
    """The first `count` rows cut to `tokens`; CalibrationError with every faulty row of the file."""
    problems = [
        Problem(f"row {number}", fault) for number, row in enumerate(rows, 1) if (fault := _fault(row, vocabulary))
    ]
    if problems:
        raise CalibrationError(f"{path}: rows that are no token ids of this model", hint=HINT, problems=problems)
    return [Row(tuple(row[:tokens]), truncated=len(row) > tokens) for row in rows[:count]]


def _fault(row: Any, vocabulary: int) -> str:
    if not isinstance(row, list):
        return f"{type(row).__name__}, not a list of token ids"
    if not row:
        return "empty"
    position = next((i for i, token in enumerate(row) if type(token) is not int), None)
    if position is not None:
        return f"position {position} holds {type(row[position]).__name__}, not a token id"
    low, high = min(row), max(row)
    if low < 0 or high >= vocabulary:
        return f"token id {low if low < 0 else high} is outside the vocabulary of {vocabulary:,}"
    return ""


def rows_digest(rows: list[Any]) -> str:
    """sha256 over all rows of the file, used or not."""
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
