"""What a validate run or a bench asks: rows of token ids to be scored, and prompts to be continued."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkquant.calibration.conversation import Conversation, Dropped, Item, Unusable
from sparkquant.calibration.dialects import item_of
from sparkquant.calibration.jsonl import read_records
from sparkquant.calibration.rows import RowMaker
from sparkquant.calibration.template import ChatTemplate
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CalibrationError
from sparkquant.evaluation_data import DRAFT_SETS, REST, Data, evaluation_folder, load_rows, spread
from sparkquant.marlin.noun import Noun

Ids = tuple[int, ...]

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
    checkpoint: Checkpoint,
    data: Data | None,
    *,
    rows: int,
    asks: int,
    room: int,
    tokens: int = ROW_TOKENS,
    thinking: bool = False,
) -> Prompts:
    """Rows and prompts for a checkpoint, with its own template and tokenizer.

    data      conversations (.jsonl), rows of token ids (.json) or a calibration mix; by default the bundled ones
    room      tokens that a prompt may have
    thinking  let the template open a thought before the answer, where it knows of such a thing
    """
    path = evaluation_folder() / "heldout.jsonl" if data is None else data
    if isinstance(path, str | os.PathLike) and Path(path).suffix in (".jsonl", ".ndjson"):
        text, kinds = _conversations(checkpoint, Path(path).expanduser(), rows, asks, room, thinking)
    else:
        found = load_rows(checkpoint, data, rows=max(rows, asks), recall=False)
        text = [tuple(ids) for ids in found.text]
        halves = [Ask(kind="text", ids=tuple(ids[: min(len(ids) // 2, room)])) for ids in found.text]
        kinds = {"text": halves}
    chosen = [ask for every in kinds.values() for ask in spread(_distinct(every), -(-asks // len(kinds)))][:asks]
    scored = [tuple(ids[:tokens]) for ids in spread(text, rows) if len(ids) > 1]
    if not chosen or not scored:
        raise CalibrationError(
            f"no prompt of {SHORTEST} to {room} tokens is in the data", hint="pass shorter conversations with --data"
        )
    return Prompts(rows=tuple(scored), asks=tuple(chosen))


def _conversations(
    checkpoint: Checkpoint, path: Path, rows: int, asks: int, room: int, thinking: bool
) -> tuple[list[Ids], dict[str, list[Ask]]]:
    """(rows of whole conversations, prompts by kind); as few are rendered as are wanted."""
    if not path.is_file():
        raise CalibrationError(f"{path}: no such file", hint="check the path")
    template = ChatTemplate.open(checkpoint.path)
    conversations = [item for item in _items(path) if isinstance(item, Conversation)]
    maker = RowMaker(template, ROW_TOKENS)
    text: list[Ids] = []
    for item in spread(conversations, rows):
        with suppress(Unusable):
            text.append(maker.whole(item).ids)
    kinds: dict[str, list[Ask]] = {}
    for item in conversations:
        kind = next((tag for tag in DRAFT_SETS if tag in item.tags), REST)
        if len(kinds.setdefault(kind, [])) < asks:
            with suppress(Unusable):
                ids = _question(item, template, thinking)
                kinds[kind] += [Ask(kind=kind, ids=ids)] if SHORTEST <= len(ids) <= room else []
    return text, {kind: found for kind, found in kinds.items() if found}


def _items(path: Path) -> Iterator[Item]:
    for record in read_records(path, path.name):
        if not isinstance(record, Dropped):
            where, value = record
            with suppress(Unusable):
                yield item_of(value, where)


def _question(item: Conversation, template: ChatTemplate, thinking: bool) -> Ids:
    """What a server would put before the model for the first answer; () where nothing is asked."""
    turns = [i for i, message in enumerate(item.messages) if message["role"] == "assistant" and i]
    if not turns:
        return ()
    text = template.render(item.messages[: turns[0]], item.tools, {**item.options, "enable_thinking": thinking})
    return template.ids(text)


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
