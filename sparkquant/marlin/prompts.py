"""What a validate run or a bench asks: rows of token ids to be scored, and prompts to be continued."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CalibrationError
from sparkquant.evaluation_data import REST, Data, EvaluationRows, load_rows, spread
from sparkquant.marlin.noun import Noun

SHORTEST = 8
"""Tokens of the shortest prompt worth asking."""
ROW_TOKENS = 512


class Ask(Noun):
    """One prompt that ends where the model would go on; `kind` is `edit`, `fresh` or `text`."""

    kind: str
    ids: tuple[int, ...]


class Prompts(Noun):
    """`rows` are scored, `asks` are continued; no ask is like another."""

    rows: tuple[tuple[int, ...], ...]
    asks: tuple[Ask, ...]

    @property
    def digest(self) -> str:
        """sha256 of all of it: observations of two runs are compared only when it is equal."""
        plain = [self.rows, [[ask.kind, ask.ids] for ask in self.asks]]
        return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()


def prompts_of(
    checkpoint: Checkpoint, data: Data | None, *, rows: int, asks: int, room: int, tokens: int = ROW_TOKENS
) -> Prompts:
    """Rows and prompts for a checkpoint, with its own template and tokenizer.

    data   conversations (.jsonl), rows of token ids (.json) or a calibration mix; the bundled conversations by default
    room   tokens that a prompt may have
    """
    found = load_rows(checkpoint, data, tokens=None)
    kinds = {name: _distinct(_starts(found, name, room)) for name in found.drafts}
    chosen = [ask for name, every in kinds.items() for ask in spread(every, -(-asks // len(kinds)))][:asks]
    text = [tuple(ids[:tokens]) for ids in spread(found.text, rows)]
    if not chosen or not text:
        raise CalibrationError(
            f"no prompt of at most {room} tokens is in the data", hint="pass shorter conversations with --data"
        )
    return Prompts(rows=tuple(text), asks=tuple(chosen))


def _starts(found: EvaluationRows, name: str, room: int) -> list[Ask]:
    """What stands before the first answer of every row; the first half of rows without answers."""
    asks = []
    for row in found.drafts[name]:
        begins = [begin for begin, _ in row.spans if SHORTEST <= begin <= room]
        end = begins[0] if begins else 0 if row.spans else min(len(row.ids) // 2, room)
        if end >= SHORTEST:
            asks.append(Ask(kind=name if name != REST else "text", ids=tuple(row.ids[:end])))
    return asks


def _distinct(asks: Sequence[Ask]) -> list[Ask]:
    known: dict[tuple[int, ...], Ask] = {}
    for ask in asks:
        known.setdefault(ask.ids, ask)
    return list(known.values())


def counts(prompts: Prompts) -> Mapping[str, Any]:
    """What was asked, in numbers."""
    kinds: dict[str, int] = {}
    for ask in prompts.asks:
        kinds[ask.kind] = kinds.get(ask.kind, 0) + 1
    return {"rows": len(prompts.rows), "tokens": sum(map(len, prompts.rows)), "asks": kinds, "digest": prompts.digest}
