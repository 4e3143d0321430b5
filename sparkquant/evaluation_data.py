"""What an evaluation runs: the bundled conversations and recall tasks, or the user's own, as rows of token ids.

Texts are rendered by the source's own template and tokenizer, with the means of `sparkquant.calibration`. Whoever made
a result must not have calibrated on these texts: a model that was tuned on a text is not measured by it.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sparkquant.calibration.conversation import Conversation, Dropped, Item, Reason, Unusable
from sparkquant.calibration.dialects import item_of
from sparkquant.calibration.jsonl import read_records
from sparkquant.calibration.loading import load_calibration, vocabulary_of, wish_of
from sparkquant.calibration.messages import messages_of
from sparkquant.calibration.mix import MAX_TOKENS, Mix
from sparkquant.calibration.ready_rows import read_ready_rows, ready_rows
from sparkquant.calibration.rows import RowMaker
from sparkquant.calibration.sufficiency import ALLOWED
from sparkquant.calibration.template import ChatTemplate
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CalibrationError, CheckpointError, Problem

Data = str | os.PathLike[str] | Mix
Ids = Sequence[int]

TOKENS = 3072
"""No bundled conversation is longer, with the tokenizer of any model that was tried."""

ROWS = 128
"""Rows that are taken of a user's own conversations when no number is given."""

DRAFT_SETS = ("edit", "fresh")
"""Tags whose draft acceptance is told apart: copied text is predicted far better than new text."""

REST = "text"
"""The draft set of everything without such a tag."""

HINT = 'a task is a line like {"messages": [{"role": "user", "content": "..."}], "answer": "..."}'


@dataclass(frozen=True)
class DraftRow:
    """A row for draft acceptance. `spans` are the parts that the model itself would have written; empty: all of it."""

    ids: Ids
    spans: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class EvaluationRows:
    """What is run: token ids only. A row that serves for several purposes is run once.

    text    rows for KL, top-1 and NLL
    recall  (prompt ids, answer ids) pairs: exact when every answer token is the most likely one after its prefix, which
            is what greedy decoding would have written
    drafts  named sets of rows for draft acceptance, for instance edit-heavy and fresh text
    notes   what was cut or left out on the way here
    """

    text: Sequence[Ids] = ()
    recall: Sequence[tuple[Ids, Ids]] = ()
    drafts: Mapping[str, Sequence[DraftRow]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 of all ids: two evaluations compare only when it is equal."""
        plain = [
            [list(row) for row in self.text],
            [[list(prompt), list(answer)] for prompt, answer in self.recall],
            {name: [[list(r.ids), list(map(list, r.spans))] for r in rows] for name, rows in self.drafts.items()},
        ]
        return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def evaluation_folder() -> Path:
    """Where the bundled evaluation data lies: inside the wheel, or in the source checkout."""
    packaged = Path(str(importlib.resources.files("sparkquant"))) / "_evaluation"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parent.parent / "evaluation"


def load_rows(
    source: Checkpoint,
    data: Data | None = None,
    tasks: str | os.PathLike[str] | None = None,
    *,
    rows: int | None = None,
    tokens: int | None = None,
    recall: bool = True,
) -> EvaluationRows:
    """Rows for `source`, from the bundled data or from files.

    data    rows of token ids (.json), conversations (.jsonl, or .json with a list), or a calibration mix (.yaml, name)
    tasks   recall tasks (.jsonl)
    rows    at most so many rows, and as many tasks, spread over the file; of token ids and mixes the first ones
    tokens  longer rows are cut, longer tasks are left out
    recall  tasks are wanted at all
    """
    wish = wish_of(rows, tokens, None)
    made = _Rows(source, wish.tokens, wish.rows)
    made.add_data(data)
    if recall:
        made.add_tasks(tasks, optional=tasks is None and data is not None)
    if not made.text or max(map(len, made.text)) < 2:
        raise CalibrationError(
            "no row is left to evaluate on", hint="pass rows of token ids: data=FILE.json", problems=made.problems
        )
    _demand_vocabulary(made, vocabulary_of(source))
    drafts = {name: tuple(found) for name, found in made.drafts.items()}
    return EvaluationRows(tuple(made.text), tuple(made.recall), drafts, tuple(made.notes))


class _Rows:
    """Rows as they are gathered, with what there is to say of them."""

    def __init__(self, source: Checkpoint, tokens: int | None, rows: int | None) -> None:
        self.source, self.tokens, self.rows = source, tokens, rows
        self.text: list[Ids] = []
        self.recall: list[tuple[Ids, Ids]] = []
        self.drafts: dict[str, list[DraftRow]] = {}
        self.notes: list[str] = []
        self.problems: list[Problem] = []
        self._template: ChatTemplate | None = None

    @property
    def template(self) -> ChatTemplate:
        """The source's own, opened when it is needed."""
        self._template = self._template or ChatTemplate.open(self.source.path)
        return self._template

    def add_data(self, data: Data | None) -> None:
        if data is None:
            self._add_conversations(evaluation_folder() / "heldout.jsonl", most=None)
            return
        path = None if isinstance(data, Mix) else Path(data).expanduser()
        if path is not None and path.suffix == ".json":
            found = read_ready_rows(path)
            if found is not None:
                self._add_ready_rows(found, path)
                return
        if path is not None and path.suffix in (".json", ".jsonl", ".ndjson"):
            if not path.is_file():
                raise CalibrationError(f"{path}: no such file", hint="check the path")
            self._add_conversations(path, most=ROWS)
            return
        calibration = load_calibration(data, self.source, rows=self.rows, tokens=self.tokens, allow=ALLOWED)
        self.notes.append("these rows come from a calibration mix: they flatter a result that was calibrated on it")
        for ids in calibration.rows:
            self._add(ids, REST, ())

    def _add(self, ids: Ids, name: str, spans: Sequence[tuple[int, int]]) -> None:
        self.text.append(ids)
        self.drafts.setdefault(name, []).append(DraftRow(ids, spans))

    def _add_ready_rows(self, found: list[Any], path: Path) -> None:
        count, tokens = self.rows or len(found), self.tokens or MAX_TOKENS
        rows = ready_rows(found, path, count=count, tokens=tokens, vocabulary=vocabulary_of(self.source))
        for row in rows:
            self._add(row.ids, REST, ())
        self._note_cut(sum(row.truncated for row in rows), len(rows), tokens)

    def _add_conversations(self, path: Path, *, most: int | None) -> None:
        tokens = self.tokens or TOKENS
        items, dropped = _items(path)
        chosen = spread(items, self.rows or most or len(items))
        if len(chosen) < len(items):
            self.notes.append(f"{len(chosen)} of {len(items)} conversations are used, spread over the file")
        maker, cut = RowMaker(self.template, tokens), 0
        for item in chosen:
            try:
                ids = maker.whole(item).ids
                spans = _answers(item, ids, self.template) if isinstance(item, Conversation) else ()
            except Unusable as fault:
                dropped.append(Dropped(item.where, fault.reason, fault.what))
                continue
            cut += len(ids) > tokens
            name = next((tag for tag in DRAFT_SETS if tag in item.tags), REST)
            self._add(ids[:tokens], name, [(a, min(b, tokens)) for a, b in spans if a < tokens])
        self._note_cut(cut, len(chosen), tokens)
        self._note_dropped(dropped, "conversations")

    def _note_cut(self, cut: int, count: int, tokens: int) -> None:
        if cut:
            self.notes.append(f"{cut} of {count} rows are cut to {tokens:,} tokens")

    def _note_dropped(self, dropped: Sequence[Dropped], what: str) -> None:
        reasons = Counter(str(entry.reason) for entry in dropped)
        if reasons:
            told = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
            self.notes.append(f"{what} left out: {told}")
        self.problems += [Problem(entry.where, f"{entry.reason}: {entry.what}") for entry in dropped]

    def add_tasks(self, tasks: str | os.PathLike[str] | None, *, optional: bool) -> None:
        path = evaluation_folder() / "recall.jsonl" if tasks is None else Path(tasks).expanduser()
        found = spread(_tasks(path), self.rows or 10**9)
        try:
            template = self.template
        except CheckpointError as error:
            if not optional:
                raise
            self.notes.append(f"no recall tasks: {error.what}")
            return
        tokens, long, dropped = self.tokens or TOKENS, 0, []
        for where, messages, answer in found:
            try:
                prompt, expected = _exchange(template, messages, answer)
            except Unusable as fault:
                dropped.append(Dropped(where, fault.reason, fault.what))
                continue
            if len(prompt) + len(expected) > tokens:
                long += 1
            else:
                self.recall.append((prompt, expected))
        if long:
            self.notes.append(f"{long} of {len(found)} recall tasks are longer than {tokens:,} tokens and left out")
        self._note_dropped(dropped, "recall tasks")


Entry = TypeVar("Entry")


def spread(entries: Sequence[Entry], count: int) -> list[Entry]:
    """At most `count` of them, evenly over the whole: files list one kind after the other."""
    if count >= len(entries):
        return list(entries)
    return [entries[(2 * index + 1) * len(entries) // (2 * count)] for index in range(count)]


def _items(path: Path) -> tuple[list[Item], list[Dropped]]:
    items: list[Item] = []
    dropped: list[Dropped] = []
    for record in read_records(path, path.name):
        if isinstance(record, Dropped):
            dropped.append(record)
            continue
        where, value = record
        try:
            items.append(item_of(value, where))
        except Unusable as fault:
            dropped.append(Dropped(where, fault.reason, fault.what))
    return items, dropped


def _answers(conversation: Conversation, ids: Ids, template: ChatTemplate) -> list[tuple[int, int]]:
    """Where the assistant's turns are in the row: behind what is rendered before them, up to what follows."""

    def shared(count: int) -> int:
        text = template.render(conversation.messages[:count], conversation.tools, conversation.options)
        return _common(template.ids(text), ids)

    turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant" and i]
    spans = [(shared(turn), shared(turn + 1)) for turn in turns]
    return [(begin, end) for begin, end in spans if begin < end]


def _common(a: Ids, b: Ids) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _tasks(path: Path) -> list[tuple[str, Sequence[Mapping[str, Any]], str]]:
    """(place, messages, answer) of every line; CalibrationError with every faulty one."""
    if not path.is_file():
        raise CalibrationError(f"{path}: no such file", hint="check the path")
    found, problems = [], []
    for record in read_records(path, path.name):
        if isinstance(record, Dropped):
            problems.append(Problem(record.where, record.what))
            continue
        where, value = record
        try:
            found.append((where, *_task(value)))
        except Unusable as fault:
            problems.append(Problem(where, fault.what))
    if problems or not found:
        raise CalibrationError(f"{path}: no recall tasks", hint=HINT, problems=problems)
    return found


def _task(value: Any) -> tuple[Sequence[Mapping[str, Any]], str]:
    answer = value.get("answer") if isinstance(value, Mapping) else None
    if not isinstance(answer, str) or not answer:
        raise Unusable(Reason.NOT_A_CONVERSATION, "it has no `answer`")
    messages = messages_of(value.get("messages"))
    if messages[-1]["role"] == "assistant":
        raise Unusable(Reason.NOT_A_CONVERSATION, "the last message is no question")
    return messages, answer


def _exchange(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], answer: str) -> tuple[Ids, Ids]:
    """Prompt and answer as greedy decoding would meet them: the prompt's tokens stay what they are."""
    text = template.render(messages, (), {"enable_thinking": False})
    prompt, whole = template.ids(text), template.ids(text + answer)
    return prompt, whole[len(prompt) :] if whole[: len(prompt)] == prompt else template.ids(answer)


def _every_row(rows: _Rows) -> Iterator[Ids]:
    yield from rows.text
    for prompt, answer in rows.recall:
        yield prompt
        yield answer


def _demand_vocabulary(rows: _Rows, vocabulary: int) -> None:
    highest = max((max(ids) for ids in _every_row(rows) if ids), default=0)
    if highest >= vocabulary:
        raise CheckpointError(
            f"the tokenizer makes token id {highest}, the model's vocabulary ends at {vocabulary:,}",
            hint="tokenizer and weights do not belong together: fetch the checkpoint again",
        )
