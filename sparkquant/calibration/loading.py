"""From a mix, a file of conversations or a file of token ids to a CalibrationSet for one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkquant.calibration.calibration_set import CalibrationSet
from sparkquant.calibration.mix import MAX_ROWS, MAX_TOKENS, Mix
from sparkquant.calibration.mix_files import load_mix
from sparkquant.calibration.ready_rows import NAME, read_ready_rows, ready_rows, rows_digest
from sparkquant.calibration.rows import Row, RowMaker
from sparkquant.calibration.selection import Selection, SourceCount, select
from sparkquant.calibration.sufficiency import demand_known, raise_refusals, refused, selection_checks, token_checks
from sparkquant.calibration.template import ChatTemplate
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CalibrationError, CheckpointError, Problem

Spec = str | os.PathLike[str] | Mix
Model = Checkpoint | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller asked for; None leaves it to the mix."""

    rows: int | None
    tokens: int | None
    seed: int | None


def load_calibration(
    spec: Spec,
    checkpoint: Model,
    *,
    rows: int | None = None,
    tokens: int | None = None,
    seed: int | None = None,
    allow: Collection[str] = (),
) -> CalibrationSet:
    """Rows for `checkpoint` from a shipped mix, a mix file, a JSONL of conversations, or a JSON file of token ids.

    `rows`, `tokens` (per row) and `seed` replace those of the mix. Raises CalibrationError when the data cannot serve:
    too few tokens for the model, no reasoning for a thinking model, too many rows cut, a source that gives nothing.
    `allow` overrules by name ("few-tokens", "no-thinking", "truncated", "empty-source"); "null-content" in it renders
    null as an empty text for templates that cannot take it, instead of dropping those rows.
    """
    calibration, _ = make_calibration(spec, opened(checkpoint), wish_of(rows, tokens, seed), allow)
    raise_refusals(calibration.name, calibration.checks, calibration.problems)
    return calibration


def opened(checkpoint: Model) -> Checkpoint:
    """The checkpoint behind a folder or a hub id."""
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    from sparkquant.source import locate

    return locate(checkpoint).checkpoint


def wish_of(rows: int | None, tokens: int | None, seed: int | None) -> Wish:
    limits = (("rows", rows, 1, MAX_ROWS), ("tokens", tokens, 16, MAX_TOKENS), ("seed", seed, 0, 2**63 - 1))
    for name, value, low, high in limits:
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise CalibrationError(f"{name}={value!r} is out of range", hint=f"from {low:,} to {high:,}")
    return Wish(rows, tokens, seed)


def make_calibration(
    spec: Spec, checkpoint: Checkpoint, wish: Wish, allow: Collection[str]
) -> tuple[CalibrationSet, ChatTemplate | None]:
    """The set with all its findings, not yet refused, and the template that made it."""
    demand_known(allow)
    if not isinstance(spec, Mix) and Path(spec).suffix == ".json":
        path = Path(spec).expanduser()
        found = read_ready_rows(path)
        if found is not None:
            return _from_ready_rows(found, path, checkpoint, wish, allow), None
    return _from_mix(load_mix(spec), checkpoint, wish, allow)


def _from_ready_rows(
    found: list[Any], path: Path, checkpoint: Checkpoint, wish: Wish, allow: Collection[str]
) -> CalibrationSet:
    longest = max((len(row) for row in found if isinstance(row, list)), default=1)
    tokens, count = wish.tokens or min(longest, MAX_TOKENS), wish.rows or len(found)
    rows = ready_rows(found, path, count=count, tokens=tokens, vocabulary=vocabulary_of(checkpoint))
    account = SourceCount(
        read=len(found),
        used=len(rows),
        unused=len(found) - len(rows),
        rows=len(rows),
        tokens=sum(r.length for r in rows),
    )
    return CalibrationSet(
        name=NAME,
        rows=tuple(row.ids for row in rows),
        sources=(NAME,) * len(rows),
        tokens_per_row=tokens,
        seed=0,
        made={"mix": "", "data": rows_digest(found), "template": "", "tokenizer": ""},
        counts={NAME: _account(account)},
        kinds=_kinds(rows, known=False),
        # Their maker chose their length, and the caller to cut them: nothing to refuse, but to be told.
        checks=refused(list(token_checks(rows, checkpoint.text_config)), {*allow, "truncated"}),
    )


def _from_mix(
    mix: Mix, checkpoint: Checkpoint, wish: Wish, allow: Collection[str]
) -> tuple[CalibrationSet, ChatTemplate]:
    template = ChatTemplate.open(checkpoint.path)
    tokens, seed = wish.tokens or mix.tokens, mix.seed if wish.seed is None else wish.seed
    wanted = wish.rows or mix.rows
    maker = RowMaker(template, tokens, empty_null="null-content" in allow)
    selection = select(mix, maker, rows=wanted, seed=seed)
    rows = [row for _, row in selection.rows]
    _demand_vocabulary(rows, checkpoint)
    checks = [
        *token_checks(rows, checkpoint.text_config),
        *selection_checks(mix, selection, wanted=wanted, thinking_model=template.thinking),
    ]
    made = {
        "mix": mix.digest,
        "data": selection.data_digest,
        "template": template.digest,
        "tokenizer": template.tokenizer_digest,
    }
    calibration = CalibrationSet(
        name=mix.name,
        rows=tuple(row.ids for row in rows),
        sources=tuple(name for name, _ in selection.rows),
        tokens_per_row=tokens,
        seed=seed,
        made=made,
        counts={name: _account(count) for name, count in selection.counts.items()},
        kinds=_kinds(rows, known=True),
        checks=refused(checks, allow),
        problems=_problems(selection),
    )
    return calibration, template


def _demand_vocabulary(rows: Sequence[Row], checkpoint: Checkpoint) -> None:
    highest, vocabulary = max((max(row.ids) for row in rows), default=0), vocabulary_of(checkpoint)
    if highest >= vocabulary:
        raise CalibrationError(
            f"the tokenizer makes token id {highest}, the model's vocabulary ends at {vocabulary:,}",
            hint="tokenizer and weights do not belong together: fetch the checkpoint again",
        )


def vocabulary_of(checkpoint: Checkpoint) -> int:
    """Rows of the embedding: from config.json, or from the header of the tensor."""
    stated = checkpoint.text_config.get("vocab_size", checkpoint.config.get("vocab_size"))
    if type(stated) is int and stated > 0:
        return stated
    for name, header in checkpoint.tensors.items():
        if name.endswith("embed_tokens.weight") and len(header.shape) == 2:
            return header.shape[0]
    raise CheckpointError(f"{checkpoint.path}: config.json states no vocab_size", hint="fetch config.json again")


def _account(count: SourceCount) -> Mapping[str, Any]:
    return {
        "read": count.read,
        "dropped": {str(reason): number for reason, number in sorted(count.dropped.items())},
        "filtered": count.filtered,
        "used": count.used,
        "unused": count.unused,
        "rows": count.rows,
        "tokens": count.tokens,
    }


def _kinds(rows: Sequence[Row], *, known: bool) -> dict[str, int]:
    """Rows by what they hold; of ready rows only their cut is known."""
    kinds = {"truncated": sum(row.truncated for row in rows)}
    if known:
        kinds |= {kind: sum(getattr(row, kind) for row in rows) for kind in ("thinking", "tools", "part")}
    return kinds


def _problems(selection: Selection) -> tuple[Problem, ...]:
    return tuple(Problem(dropped.where, f"{dropped.reason}: {dropped.what}") for dropped in selection.dropped)
