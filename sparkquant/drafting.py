"""The in-checkpoint draft head, which transformers never loads: how often would its drafts be accepted?

Teacher-forced agreement: the text's own tokens are fed, and a draft at position j counts as accepted when the draft
head's most likely token equals the target's at every position up to j. No sampling, no engine, source and result alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparkquant.errors import CheckpointError
from sparkquant.stream import Head, StreamedModel

STARTS = 64
"""Drafts per row, spread evenly: each costs k positions in the draft head's attention."""

QUERIES = 512
"""Positions that attend at once: the mask has as many rows, and a column for each position before."""

LOGITS = 2**24
"""Logits that are in memory at once, per side."""

NO_HEAD = "the checkpoint has no draft head (mtp.*)"


class NotFinite(ArithmeticError):
    """Logits hold NaN or infinity: whose fault that is, the caller knows."""


def logits_of(head: Head, states: Tensor) -> Iterator[Tensor]:
    """Logits of normalized states [L, H], a few positions at a time; NotFinite when one of them is not."""
    vocabulary = int(getattr(head.linear, "weight").shape[0])  # noqa: B009  # a Linear, seen as any module
    size = max(1, LOGITS // vocabulary)
    for begin in range(0, states.shape[0], size):
        logits = head.logits(states[begin : begin + size])
        if not bool(torch.isfinite(logits).all()):
            raise NotFinite
        yield logits


def most_likely(head: Head, states: Tensor) -> Tensor:
    """The most likely token behind each state, [L]."""
    return torch.cat([logits.argmax(-1) for logits in logits_of(head, states)])


@dataclass
class Acceptance:
    """Counts over drafts: `accepted[j]` of `drafts` reached position j + 1."""

    drafts: int
    accepted: list[int]

    @property
    def rates(self) -> list[float]:
        """Acceptance rate by draft position; empty without drafts."""
        return [count / self.drafts for count in self.accepted] if self.drafts else []

    def add(self, other: Acceptance) -> None:
        """Add another row's counts."""
        self.drafts += other.drafts
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]


def starts_of(length: int, spans: Sequence[tuple[int, int]], k: int) -> list[int]:
    """Where drafts begin: up to STARTS positions whose k drafted tokens lie inside the spans, or anywhere without any.

    A draft from position s has seen the tokens up to s + 1 and guesses those from s + 2 on: the first token of an
    answer is the target's own.
    """
    ranges = [range(max(0, a - 1), min(b, length) - 1 - k) for a, b in spans] or [range(length - k)]
    places = sorted({position for found in ranges for position in found})
    step = (len(places) - 1) / max(1, STARTS - 1)
    return places if len(places) <= STARTS else [places[round(index * step)] for index in range(STARTS)]


class DraftHead:
    """`mtp.*` of the Qwen hybrids: fc over [embedding of the next token, hidden state], one attention block, a norm."""

    def __init__(self, model: StreamedModel) -> None:
        names = model.draft_names
        if not names:
            raise CheckpointError(NO_HEAD, hint="evaluate without draft acceptance")
        if not all(any(name.startswith(part) for name in names) for part in ("mtp.fc.", "mtp.layers.0.")):
            raise CheckpointError(
                "its draft head is of a kind that is not run here", hint="measure acceptance on an engine"
            )
        self._model = model
        self._block = model.attention_block()
        self._norms = nn.ModuleDict(
            {name: model.norm_like() for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        )
        width = next(p.shape[0] for p in self._norms["norm"].parameters())
        with torch.device("meta"):
            self._fc = nn.Linear(2 * width, width, bias=False)

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """The head's own weights; embedding and lm_head are the model's."""
        names = self._model.draft_names
        with (
            self._model.loaded(self._block, "mtp.layers.0", names),
            self._model.loaded(self._norms, "mtp", names),
            self._model.loaded(self._fc, "mtp.fc", names),
            torch.no_grad(),
        ):
            yield

    def acceptance(
        self, ids: Tensor, states: Tensor, starts: Sequence[int], embedding: nn.Module, head: Head, k: int = 4
    ) -> Acceptance:
        """k drafts from each start of one row: `ids` [L], the target's normalized `states` [L, H]."""
        if not starts:
            return Acceptance(0, [0] * k)
        first = torch.tensor(starts, device=ids.device)
        compared = torch.unique(first[:, None] + torch.arange(1, k + 1, device=ids.device))
        target = torch.empty_like(ids)
        target[compared] = most_likely(head, states[compared])
        past = _Past(ids.device)
        embedded = embedding(ids[: starts[-1] + k + 1])
        agree = torch.ones(len(starts), dtype=torch.bool, device=ids.device)
        accepted = []
        context = starts[-1] + 1  # the first step runs at every position: later steps attend to all of them
        everywhere = torch.arange(context, device=ids.device)
        at = self._step(past, embedded[1 : context + 1], states[:context], everywhere, 0)[first]
        for step in range(k):
            agree &= most_likely(head, at) == target[first + step + 1]
            accepted.append(int(agree.sum()))
            if step + 1 < k:
                at = self._step(past, embedded[first + step + 2], at, first, step + 1)
        return Acceptance(len(starts), accepted)

    def _step(self, past: _Past, embedded: Tensor, states: Tensor, origin: Tensor, step: int) -> Tensor:
        """One draft step of the chains that began at `origin`: what comes out is the next step's states."""
        outputs = []
        for begin in range(0, origin.shape[0], QUERIES):
            part = slice(begin, begin + QUERIES)
            outputs.append(self._attend(past, self._join(embedded[part], states[part]), origin[part], step))
        return torch.cat(outputs)

    def _join(self, embedded: Tensor, states: Tensor) -> Tensor:
        parts = [self._norms["pre_fc_norm_embedding"](embedded), self._norms["pre_fc_norm_hidden"](states)]
        joined: Tensor = self._fc(torch.cat(parts, dim=-1))
        return joined

    def _attend(self, past: _Past, inputs: Tensor, origin: Tensor, step: int) -> Tensor:
        visible = past.extend(origin, step)
        mask = torch.zeros(visible.shape, dtype=inputs.dtype, device=inputs.device)
        mask.masked_fill_(~visible, torch.finfo(inputs.dtype).min)
        positions = origin + step
        result = self._block(
            inputs[None],
            position_embeddings=self._model.positions(positions),
            attention_mask=mask[None, None],
            position_ids=positions[None],
            past_key_values=past,
        )
        out: Tensor = self._norms["norm"]((result[0] if isinstance(result, tuple) else result)[0])
        return out


class _Past:
    """Keys and values of the draft block so far, each with the start of its chain and its step in it."""

    def __init__(self, device: torch.device) -> None:
        self._origin = torch.empty(0, dtype=torch.long, device=device)
        self._step = torch.empty(0, dtype=torch.long, device=device)
        self._stored: tuple[Tensor, Tensor] | None = None

    def extend(self, origin: Tensor, step: int) -> Tensor:
        """Note who comes next, and say which keys they see [new, all]: first steps before them, and their own chain."""
        self._origin = torch.cat([self._origin, origin])
        self._step = torch.cat([self._step, torch.full_like(origin, step)])
        first = (self._step == 0) & (self._origin <= origin[:, None])
        return first | ((self._origin == origin[:, None]) & (self._step <= step))

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What transformers' attention calls: append [1, heads, new, width], get all."""
        if self._stored is not None:
            key, value = (torch.cat(pair, dim=-2) for pair in zip(self._stored, (key, value), strict=True))
        self._stored = key, value
        return key, value
