"""Rows that have been through both models: what their logits say, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sparkquant.drafting import NotFinite, logits_of, most_likely, starts_of
from sparkquant.errors import CheckFailed, CheckpointError, SparkquantError
from sparkquant.evaluation_data import EvaluationRows
from sparkquant.events import Advanced, Listener
from sparkquant.stream import Batch, Head, StreamedModel

SIDES = ("source", "result")


@dataclass
class Side:
    """One of the two models on its way through the blocks."""

    name: str
    model: StreamedModel
    batches: list[Batch]

    def fault(self, where: str) -> SparkquantError:
        """What to raise when this side computes NaN or infinity."""
        what = f"the {self.name} computes NaN or infinity {where}"
        if self.name == "source":
            return CheckpointError(what, hint="its weights are at fault: fetch them again")
        return CheckFailed(what, hint="`sparkquant verify OUT --source SRC --deep` names the tensor")


@dataclass(frozen=True)
class Roles:
    """Which distinct row of ids serves for what."""

    rows: EvaluationRows

    @cached_property
    def index(self) -> dict[tuple[int, ...], int]:
        """Every distinct row and its number."""
        every = [tuple(ids) for ids in self.rows.text]
        every += [(*prompt, *answer) for prompt, answer in self.rows.recall]
        every += [tuple(row.ids) for group in self.rows.drafts.values() for row in group]
        return {ids: number for number, ids in enumerate(dict.fromkeys(every))}

    @cached_property
    def text(self) -> dict[int, list[int]]:
        """Row number -> places among the text rows."""
        return self._places([tuple(ids) for ids in self.rows.text])

    @cached_property
    def recall(self) -> dict[int, list[int]]:
        """Row number -> places among the recall tasks."""
        return self._places([(*prompt, *answer) for prompt, answer in self.rows.recall])

    def _places(self, every: Sequence[tuple[int, ...]]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for place, ids in enumerate(every):
            found.setdefault(self.index[ids], []).append(place)
        return found

    def starts(self, name: str, k: int) -> dict[int, list[int]]:
        """Row number -> where drafts of k tokens begin, for one draft set."""
        found = {}
        for row in self.rows.drafts[name]:
            found[self.index[tuple(row.ids)]] = starts_of(len(row.ids), row.spans, k)
        return found


@dataclass
class Scores:
    """What the rows have shown so far; `token_kl` is (place in its row, values from there on)."""

    kl: list[float]
    exact: tuple[list[bool], list[bool]]
    token_kl: list[tuple[int, Tensor]] = field(default_factory=list)
    agree: int = 0
    nll: list[float] = field(default_factory=lambda: [0.0, 0.0])
    predicted: int = 0
    tokens: int = 0


def score(sides: Sequence[Side], roles: Roles, listener: Listener) -> Scores:
    tasks = roles.rows.recall
    scores = Scores([0.0] * len(roles.rows.text), ([False] * len(tasks), [False] * len(tasks)))
    with ExitStack() as stack:
        heads = [stack.enter_context(side.model.head()) for side in sides]
        for a, b in zip(*(side.batches for side in sides), strict=True):
            for position, row in enumerate(a.rows):
                length = int(a.valid[position].sum())
                ids, hidden = a.ids[position, :length], [batch.hidden[position, :length] for batch in (a, b)]
                states = [head.normalize(h) for head, h in zip(heads, hidden, strict=True)]
                for place in roles.text.get(row, ()):
                    scores.kl[place] = _score_text(scores, ids, states, heads, sides)
                for place in roles.recall.get(row, ()):
                    prompt = len(tasks[place][0])
                    for number, side in enumerate(sides):
                        guesses = _guesses(side, heads[number], states[number][prompt - 1 : -1])
                        scores.exact[number][place] = torch.equal(guesses, ids[prompt:])
            listener(Advanced("score", a.hidden.nbytes + b.hidden.nbytes, f"{len(a.rows)} rows"))
    return scores


def _guesses(side: Side, head: Head, states: Tensor) -> Tensor:
    try:
        return most_likely(head, states)
    except NotFinite:
        raise side.fault("in its logits") from None


def _score_text(
    scores: Scores, ids: Tensor, states: Sequence[Tensor], heads: Sequence[Head], sides: Sequence[Side]
) -> float:
    """Mean KL of one row; everything else is added to `scores`."""
    total, start = 0.0, 0
    for p, q in zip(*(_log_probabilities(*each) for each in zip(sides, heads, states, strict=True)), strict=True):
        kl = (p.exp() * (p - q)).sum(-1)
        total += float(kl.double().sum())
        scores.token_kl.append((start, kl.cpu()))
        scores.agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        following = ids[start + 1 : start + 1 + len(p)]
        for side, log_probabilities in enumerate((p, q)):
            picked = log_probabilities[: len(following)].gather(-1, following[:, None])
            scores.nll[side] -= float(picked.double().sum())
        scores.predicted += len(following)
        start += len(p)
    scores.tokens += start
    return total / start


def _log_probabilities(side: Side, head: Head, states: Tensor) -> Iterator[Tensor]:
    try:
        yield from (logits.log_softmax(-1) for logits in logits_of(head, states))
    except NotFinite:
        raise side.fault("in its logits") from None
