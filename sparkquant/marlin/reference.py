"""What was observed of a reference, in a file: it may come from another machine, where the original fits."""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

from sparkquant.errors import UsageError
from sparkquant.marlin.controls import Observation, Role
from sparkquant.marlin.dialect import Settings
from sparkquant.marlin.metrics import Acceptance
from sparkquant.marlin.numbers import Position
from sparkquant.marlin.prompts import Prompts
from sparkquant.marlin.replies import SURE, Completion

KIND, FORMAT = "sparkquant-reference", 1
HINT = "make one with `sparkquant validate OUT --reference SRC --save-reference FILE`, with the same --data"


def save_reference(path: str | os.PathLike[str], run: Observation, prompts: str, about: dict[str, Any]) -> None:
    """Write a run of the reference. `prompts` is the digest of what it was asked, `about` says where it ran."""
    answers = next(iter(run.answers.values()), ())
    document = {
        "kind": KIND, "format": FORMAT, "prompts": prompts, "about": {**about, "version": run.version},
        "scores": [[[[token, round(value, 6)] for token, value in position.items()] for position in row]
                   for row in run.scores],
        "answers": [answer.model_dump(mode="json") for answer in answers],
        "acceptance": None if run.acceptance is None else run.acceptance.model_dump(mode="json"),
        "by_kind": {kind: found.model_dump(mode="json") for kind, found in run.by_kind.items()},
    }  # fmt: skip
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    # Without a time stamp: the same observations give the same bytes.
    Path(path).write_bytes(gzip.compress(text, mtime=0))


def load_reference(path: str | os.PathLike[str], prompts: Prompts) -> tuple[Observation, dict[str, Any]]:
    """(the run, where it ran). Raises UsageError for a file that is none, or that answers other prompts."""
    try:
        data = Path(path).read_bytes()
        given = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read: {error}", hint=HINT) from None
    if not isinstance(given, dict) or given.get("kind") != KIND or given.get("format") != FORMAT:
        raise UsageError(f"{path}: no record of a reference", hint=HINT)
    if given.get("prompts") != prompts.digest:
        raise UsageError(f"{path}: this reference was asked other prompts", hint=HINT)
    try:
        run = Observation(
            role=Role.REFERENCE, settings=Settings(), log=None, version=str(given["about"].get("version", "")),
            answers={1: [Completion.model_validate(answer) for answer in given["answers"]]},
            scores=_scores(given["scores"], prompts),
            acceptance=None if given["acceptance"] is None else Acceptance.model_validate(given["acceptance"]),
            by_kind={kind: Acceptance.model_validate(found) for kind, found in given["by_kind"].items()},
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise UsageError(f"{path}: a damaged record: {error}", hint=HINT) from None
    return run, dict(given["about"])


def _scores(given: Any, prompts: Prompts) -> list[list[Position]]:
    """Log probabilities of every row, or of none where a server sent none; each of them a number."""
    rows: list[list[Position]] = [
        [{int(token): float(value) for token, value in position} for position in row] for row in given
    ]
    if len(rows) != len(prompts.rows):
        raise ValueError(f"{len(rows)} rows, {len(prompts.rows)} were asked")
    for row, ids in zip(rows, prompts.rows, strict=True):
        if row and len(row) != len(ids) - 1:
            raise ValueError(f"{len(row)} positions of a row of {len(ids)} tokens")
        for position, token in zip(row, ids[1:], strict=False):
            if not position[token] <= SURE or not all(map(math.isfinite, position.values())):
                raise ValueError("a log probability is no number")
    return rows
