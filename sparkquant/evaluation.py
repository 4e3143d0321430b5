"""What quantization lost: source and result run side by side, block by block, on the same rows. No engine needed.

Weights are dequantized from the result's own files and activations stay in `dtype`: dynamic FP8 activations, which an
engine adds at run time, are not part of these numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparkquant.checkpoint import Checkpoint
from sparkquant.drafting import Acceptance, DraftHead
from sparkquant.events import Advanced, Finished, Listener, Started, ignore
from sparkquant.stream import Batch, Head, StreamedModel
from sparkquant.weights import StoredWeights

POSITIONS = 512
"""Positions whose logits are in memory at once."""

DRAFTS = 4


@dataclass(frozen=True)
class EvaluationRows:
    """What is run: token ids only.

    text    rows for KL, top-1 and NLL
    recall  (prompt ids, answer ids) pairs: exact when every answer token is the most likely one after its prefix, which
            is what greedy decoding would have written
    drafts  named sets of rows for draft acceptance, for instance edit-heavy and fresh text
    """

    text: Sequence[Sequence[int]] = ()
    recall: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
    drafts: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """sha256 of all ids: two evaluations compare only when it is equal."""
        plain = [
            [list(row) for row in self.text],
            [[list(prompt), list(answer)] for prompt, answer in self.recall],
            {name: [list(row) for row in rows] for name, rows in sorted(self.drafts.items())},
        ]
        return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Evaluation:
    """The measured differences between source and result.

    kl           nats per token, source || result: mean over rows, standard error over rows, 99th percentile over tokens
    top1         share of positions where both have the same most likely token
    nll          nats per token of the text itself, for either side
    layers       relative error of the hidden states behind each block, ||result - source|| / ||source||
    recall       exact answers of either side
    acceptance   draft acceptance by position of either side, per set of rows
    """

    rows: int
    tokens: int
    data: str
    kl_mean: float
    kl_se: float
    kl_p99: float
    kl_rows: tuple[float, ...]
    top1: float
    nll: Mapping[str, float]
    layers: tuple[float, ...]
    recall: Mapping[str, int]
    acceptance: Mapping[str, Mapping[str, Sequence[float]]]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    def worst_layers(self, count: int = 5) -> list[tuple[int, float]]:
        """Blocks that added most to the relative error, with what they added."""
        before = (0.0, *self.layers[:-1])
        added = [(index, after - b) for index, (b, after) in enumerate(zip(before, self.layers, strict=True))]
        return sorted(added, key=lambda pair: -pair[1])[:count]


@dataclass
class _Side:
    """One of the two models on its way through the blocks."""

    model: StreamedModel
    batches: list[Batch]


def compare(
    result: Checkpoint,
    source: Checkpoint,
    rows: EvaluationRows,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    listener: Listener = ignore,
) -> Evaluation:
    """Run both checkpoints over `rows`, in lockstep, one block of each in memory."""
    flat = [*rows.text, *([*p, *a] for p, a in rows.recall), *(row for group in rows.drafts.values() for row in group)]
    with StoredWeights(source) as before, StoredWeights(result) as after:
        models = [StreamedModel(c, w, device=device, dtype=dtype) for c, w in ((source, before), (result, after))]
        sides = [_Side(model, model.embed(flat)) for model in models]
        listener(Started("evaluate", models[0].depth))
        layers = []
        for index in range(models[0].depth):
            for side in sides:
                with side.model.block(index) as block:
                    for batch in side.batches:
                        batch.hidden = side.model.run(block, index, batch.hidden)
            layers.append(_relative_error(*(side.batches for side in sides)))
            listener(Advanced("evaluate", 1, f"block {index}"))
        listener(Finished("evaluate"))
        return _score(sides, rows, tuple(layers))


def _relative_error(source: Sequence[Batch], result: Sequence[Batch]) -> float:
    wrong = whole = 0.0
    for a, b in zip(source, result, strict=True):
        wrong += float((b.hidden - a.hidden)[a.valid].double().square().sum())
        whole += float(a.hidden[a.valid].double().square().sum())
    return math.sqrt(wrong / whole) if whole else 0.0


@dataclass
class _Scores:
    kl: list[float] = field(default_factory=list)
    token_kl: list[Tensor] = field(default_factory=list)
    agree: int = 0
    nll: list[float] = field(default_factory=lambda: [0.0, 0.0])
    predicted: int = 0
    tokens: int = 0
    exact: list[int] = field(default_factory=lambda: [0, 0])


def _score(sides: Sequence[_Side], rows: EvaluationRows, layers: tuple[float, ...]) -> Evaluation:
    texts, recalls = len(rows.text), len(rows.recall)
    scores = _Scores(kl=[0.0] * texts)
    with ExitStack() as stack:
        heads = [stack.enter_context(side.model.head()) for side in sides]
        for index, ids, hidden in _rows(sides):
            states = [head.normalize(h) for head, h in zip(heads, hidden, strict=True)]
            if index < texts:
                _score_text(scores, index, ids, states, heads)
            elif index < texts + recalls:
                prompt = len(rows.recall[index - texts][0])
                for side, (head, state) in enumerate(zip(heads, states, strict=True)):
                    guesses = head.logits(state[prompt - 1 : -1]).argmax(-1)
                    scores.exact[side] += int(torch.equal(guesses, ids[prompt:]))
        acceptance = {
            name: {
                label: _acceptance(side, head, members) for label, side, head in zip(_LABELS, sides, heads, strict=True)
            }
            for name, members in _members(rows).items()
            if all(side.model.draft_names for side in sides)
        }
    every = torch.cat(scores.token_kl) if scores.token_kl else torch.zeros(1)
    mean = sum(scores.kl) / max(1, texts)
    spread = math.sqrt(sum((value - mean) ** 2 for value in scores.kl) / max(1, texts - 1))
    return Evaluation(
        rows=texts,
        tokens=scores.tokens,
        data=rows.digest,
        kl_mean=mean,
        kl_se=spread / math.sqrt(max(1, texts)),
        kl_p99=float(every.quantile(0.99))
        if every.numel() < 2**24
        else float(every.sort().values[int(0.99 * len(every))]),
        kl_rows=tuple(scores.kl),
        top1=scores.agree / max(1, scores.tokens),
        nll={label: total / max(1, scores.predicted) for label, total in zip(_LABELS, scores.nll, strict=True)},
        layers=layers,
        recall={"tasks": recalls, **dict(zip(_LABELS, scores.exact, strict=True))},
        acceptance=acceptance,
    )


_LABELS = ("source", "result")


def _rows(sides: Sequence[_Side]) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
    """(row index, ids [L], hidden [L, H] of both sides) of every row, padding cut off."""
    for a, b in zip(sides[0].batches, sides[1].batches, strict=True):
        for position, index in enumerate(a.rows):
            length = int(a.valid[position].sum())
            yield index, a.ids[position, :length], [a.hidden[position, :length], b.hidden[position, :length]]


def _score_text(scores: _Scores, index: int, ids: Tensor, states: Sequence[Tensor], heads: Sequence[Head]) -> None:
    total, length = 0.0, ids.shape[0]
    for start in range(0, length, POSITIONS):
        p, q = (
            head.logits(state[start : start + POSITIONS]).log_softmax(-1)
            for head, state in zip(heads, states, strict=True)
        )
        kl = (p.exp() * (p - q)).sum(-1)
        total += float(kl.double().sum())
        scores.token_kl.append(kl.cpu())
        scores.agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        following = ids[start + 1 : start + 1 + p.shape[0]]
        for side, log_probabilities in enumerate((p, q)):
            picked = log_probabilities[: len(following)].gather(-1, following[:, None])
            scores.nll[side] -= float(picked.double().sum())
        scores.predicted += len(following)
    scores.tokens += length
    scores.kl[index] = total / length


def _members(rows: EvaluationRows) -> dict[str, range]:
    """Flat row indices of every draft set."""
    members, start = {}, len(rows.text) + len(rows.recall)
    for name, group in rows.drafts.items():
        members[name] = range(start, start + len(group))
        start += len(group)
    return members


def _acceptance(side: _Side, head: Head, members: range) -> list[float]:
    draft = DraftHead(side.model)
    total = Acceptance(0, [0] * DRAFTS)
    with draft.loaded(), side.model.embedding() as embedding:
        for batch in side.batches:
            chosen = [position for position, index in enumerate(batch.rows) if index in members]
            if chosen:
                part = Batch(
                    tuple(batch.rows[i] for i in chosen), batch.ids[chosen], batch.valid[chosen], batch.hidden[chosen]
                )
                total.add(draft.acceptance(part, head.normalize(part.hidden), embedding, head, DRAFTS))
    return total.rates
