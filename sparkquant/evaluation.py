"""What quantization lost: source and result run side by side, block by block, on the same rows. No engine needed.

    evaluation = sparkquant.evaluate("Qwen3.5-27B-W4A16", source="Qwen3.5-27B")
    evaluation.kl_mean, evaluation.acceptance["edit"]["result"], evaluation.worst_layers()

Weights are dequantized from the result's own files and activations stay in `dtype`: dynamic FP8 activations, which an
engine adds at run time, are not part of these numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparkquant.checkpoint import Checkpoint
from sparkquant.device import AUTO, usable_device
from sparkquant.divergence import ByPosition, Histogram, by_position, histogram
from sparkquant.drafting import Acceptance, DraftHead, NotFinite
from sparkquant.errors import CheckpointError, UsageError
from sparkquant.evaluation_data import Data, EvaluationRows, load_rows
from sparkquant.events import Advanced, Finished, Listener, Said, Started, ignore
from sparkquant.limits import check_limits, limits_of
from sparkquant.pairing import block_bytes, demand_pair
from sparkquant.report import Check, Status
from sparkquant.rowwise import Paired, mean_and_error, paired_rows
from sparkquant.scoring import SIDES, Roles, Scores, Side, score
from sparkquant.source import locate
from sparkquant.stream import StreamedModel
from sparkquant.weights import StoredWeights

DRAFTS = 4
"""Draft positions whose acceptance is measured."""


@dataclass(frozen=True)
class Evaluation:
    """The measured differences between source and result.

    data         digest of the rows: evaluations of the same rows can be compared
    kl           nats per token, source || result: mean over rows (each row counts once, whatever its length), standard
                 error over rows (None for a single one), 99th percentile over tokens
    top1         share of positions where both have the same most likely token
    nll          nats per token of the text itself, for either side
    layers       relative error of the hidden states behind each block, ||result - source|| / ||source||
    recall       tasks, exact answers of either side, and `lost`: exact in the source alone
    drafts       drafts counted, per set of rows
    acceptance   share of drafts accepted up to each position, per set of rows and side
    undrafted    why a side has no draft acceptance
    notes        what a reader of the numbers has to know: rows cut or left out, doubts about the pair
    checks       the recipe's limits; empty where there is no recipe
    kl_histogram, kl_positions  single positions by their KL, and the mean KL by place in the row
    """

    rows: int
    tokens: int
    data: str
    kl_mean: float
    kl_se: float | None
    kl_p99: float
    kl_rows: tuple[float, ...]
    top1: float
    nll: Mapping[str, float]
    layers: tuple[float, ...]
    recall: Mapping[str, int]
    drafts: Mapping[str, int] = field(default_factory=dict)
    acceptance: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    undrafted: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    kl_histogram: Histogram | None = None
    kl_positions: ByPosition | None = None

    @property
    def ok(self) -> bool:
        """No limit of the recipe is violated; one that could not be measured does not count as kept."""
        return all(check.status in (Status.PASS, Status.SKIPPED) for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "ok": self.ok, "checks": [check.as_json() for check in self.checks]}

    def worst_layers(self, count: int = 5) -> list[tuple[int, float]]:
        """Blocks that added most to the relative error, with what they added."""
        before = (0.0, *self.layers[:-1])
        added = [(index, after - b) for index, (b, after) in enumerate(zip(before, self.layers, strict=True))]
        return sorted(added, key=lambda pair: -pair[1])[:count]


def paired(a: Evaluation, b: Evaluation) -> Paired:
    """Mean of KL(b) - KL(a) over the rows and its standard error; rows differ far more than results do.

    Raises UsageError when the two did not see the same rows, or saw a single one.
    """
    if a.data != b.data:
        raise UsageError(
            "these evaluations ran on different rows", hint="evaluate both with the same data, rows and tokens"
        )
    if len(a.kl_rows) < 2:
        raise UsageError("one row has no standard error", hint="evaluate with more rows")
    return paired_rows(a.kl_rows, b.kl_rows)


def evaluate(
    out: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str],
    data: Data | None = None,
    tasks: str | os.PathLike[str] | None = None,
    rows: int | None = None,
    tokens: int | None = None,
    device: str = AUTO,
    listener: Listener = ignore,
) -> Evaluation:
    """Measure how far `out`, a quantized checkpoint of any producer, is from `source`; both a folder or a hub id.

    data    rows of token ids (.json), conversations (.jsonl) or a calibration mix; the bundled conversations by default
    tasks   recall tasks (.jsonl); the bundled ones by default
    rows    at most so many rows and tasks
    tokens  cut rows to so many tokens
    device  where blocks run: auto takes CUDA where there is one

    Raises CheckpointError when the two do not belong together, CheckFailed when the result computes NaN or infinity.
    """
    device = usable_device(device)
    result, original = locate(out).checkpoint, locate(source).checkpoint
    doubts = demand_pair(result, original)
    for doubt in doubts:
        listener(Said(doubt))
    accept = limits_of(result.path)
    chosen = load_rows(original, data, tasks, rows=rows, tokens=tokens)
    measured = compare(result, original, chosen, device=device, listener=listener)
    fields = {**measured.__dict__, "notes": (*doubts, *measured.notes)}
    return Evaluation(**{**fields, "checks": check_limits(measured, accept)})


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
    roles = Roles(rows)
    with StoredWeights(source) as before, StoredWeights(result) as after, torch.no_grad():
        models = [StreamedModel(c, w, device=device, dtype=dtype) for c, w in ((source, before), (result, after))]
        index = list(roles.index)
        sides = [Side(name, model, list(model.embed(index))) for name, model in zip(SIDES, models, strict=True)]
        layers = tuple(_run_blocks(sides, block_bytes(source, result), listener))
        total = sum(batch.hidden.nbytes for side in sides for batch in side.batches)
        listener(Started("score", total))
        scores = score(sides, roles, listener)
        drafts, acceptance, undrafted = _draft(sides, roles)
        listener(Finished("score"))
    return _finished(scores, rows, layers, drafts, acceptance, undrafted)


def _run_blocks(sides: Sequence[Side], sizes: Mapping[int | None, int], listener: Listener) -> Iterator[float]:
    """Send every row through every block of either side; yields the relative error behind each."""
    depth = sides[0].model.depth
    listener(Started("evaluate", sum(sizes.get(index, 0) for index in range(depth))))
    for index in range(depth):
        for side in sides:
            with side.model.block(index) as block:
                for batch in side.batches:
                    batch.hidden = side.model.run(block, index, batch.hidden)
        yield _relative_error(sides, index)
        listener(Advanced("evaluate", sizes.get(index, 0), f"block {index}"))
    listener(Finished("evaluate"))


def _relative_error(sides: Sequence[Side], index: int) -> float:
    wrong = whole = 0.0
    for a, b in zip(*(side.batches for side in sides), strict=True):
        wrong += float((b.hidden - a.hidden)[a.valid].double().square().sum())
        whole += float(a.hidden[a.valid].double().square().sum())
    for side, value in zip(sides, (whole, wrong), strict=True):
        if not math.isfinite(value):
            raise side.fault(f"behind block {index}")
    return math.sqrt(wrong / whole) if whole else 0.0


def _finished(
    scores: Scores,
    rows: EvaluationRows,
    layers: tuple[float, ...],
    drafts: Mapping[str, int],
    acceptance: Mapping[str, Mapping[str, Sequence[float]]],
    undrafted: Mapping[str, str],
) -> Evaluation:
    """The finished numbers."""
    mean, error = mean_and_error(scores.kl)
    every = torch.cat([values for _, values in scores.token_kl]).sort().values if scores.token_kl else torch.zeros(1)
    counts = dict(zip(SIDES, map(sum, scores.exact), strict=True))
    lost = sum(before and not after for before, after in zip(*scores.exact, strict=True))
    return Evaluation(
        rows=len(rows.text),
        tokens=scores.tokens,
        data=rows.digest,
        kl_mean=mean,
        kl_se=error,
        kl_p99=float(every[int(0.99 * (len(every) - 1))]),
        kl_rows=tuple(scores.kl),
        top1=scores.agree / max(1, scores.tokens),
        nll={name: total / max(1, scores.predicted) for name, total in zip(SIDES, scores.nll, strict=True)},
        layers=layers,
        recall={"tasks": len(rows.recall), **counts, "lost": lost},
        drafts=drafts,
        acceptance=acceptance,
        undrafted=undrafted,
        notes=rows.notes,
        kl_histogram=histogram(every) if scores.token_kl else None,
        kl_positions=by_position(scores.token_kl) if scores.token_kl else None,
    )


_Drafted = tuple[dict[str, int], dict[str, dict[str, list[float]]], dict[str, str]]


def _draft(sides: Sequence[Side], roles: Roles) -> _Drafted:
    """(drafts, rates by position, why not) of every draft set; one side's embedding and lm_head in memory."""
    drafts: dict[str, int] = {}
    rates: dict[str, dict[str, list[float]]] = {}
    reasons: dict[str, str] = {}
    for side in sides if roles.rows.drafts else ():
        try:
            draft = DraftHead(side.model)
            with draft.loaded(), side.model.embedding() as embedding, side.model.head() as head:
                for name in roles.rows.drafts:
                    total = Acceptance(0, [0] * DRAFTS)
                    starts = roles.starts(name, DRAFTS)
                    for ids, states, begin in _drafting_rows(side, starts):
                        total.add(draft.acceptance(ids, head.normalize(states), begin, embedding, head, DRAFTS))
                    drafts[name] = total.drafts
                    if total.drafts:
                        rates.setdefault(name, {})[side.name] = total.rates
        except NotFinite:
            raise side.fault("in its draft head") from None
        except CheckpointError as error:
            reasons[side.name] = error.what
    return drafts, rates, reasons


def _drafting_rows(side: Side, starts: Mapping[int, Sequence[int]]) -> Iterator[tuple[Tensor, Tensor, Sequence[int]]]:
    for batch in side.batches:
        for position, row in enumerate(batch.rows):
            if row in starts:
                length = int(batch.valid[position].sum())
                yield batch.ids[position, :length], batch.hidden[position, :length], starts[row]
