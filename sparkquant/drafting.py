"""The in-checkpoint draft head, which transformers never loads: how often would its drafts be accepted?

Teacher-forced agreement: the text's own tokens are fed, and a draft at position j counts as accepted when the draft
head's most likely token equals the target's at every position up to j. No sampling, no engine, source and result alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparkquant.errors import CheckpointError
from sparkquant.stream import Batch, Head, StreamedModel

STARTS = 64
"""Drafts per row: every start costs k - 1 more positions in the draft head's attention."""


@dataclass
class Acceptance:
    """Counts over drafts: `accepted[j]` of `drafts` reached position j + 1."""

    drafts: int
    accepted: list[int]

    @property
    def rates(self) -> list[float]:
        """Acceptance rate by draft position."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.accepted]

    def add(self, other: Acceptance) -> None:
        """Add another row's counts."""
        self.drafts += other.drafts
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]


class DraftHead:
    """`mtp.*` of the Qwen hybrids: fc over [embedding of the next token, hidden state], one attention block, a norm."""

    def __init__(self, model: StreamedModel) -> None:
        self._model = model
        self._block = model.attention_block()
        self._norms = nn.ModuleDict(
            {name: model.norm_like() for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        )
        shapes = [name for name in model.draft_names if name.endswith("mtp.fc.weight")]
        if not shapes or not any(name.startswith("mtp.layers.0.") for name in model.draft_names):
            raise CheckpointError("the checkpoint has no draft head (mtp.*)", hint="evaluate without draft acceptance")
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

    def acceptance(self, batch: Batch, normalized: Tensor, embedding: nn.Module, head: Head, k: int = 4) -> Acceptance:
        """Agreement of k drafts from up to STARTS starts a row; `normalized` [B, L, H] are the target's states."""
        total = Acceptance(0, [0] * k)
        for row in range(batch.ids.shape[0]):
            length = int(batch.valid[row].sum())
            if length > k + 2:
                total.add(self._row(batch.ids[row, :length], normalized[row, :length], embedding, head, k))
        return total

    def _row(self, ids: Tensor, hidden: Tensor, embedding: nn.Module, head: Head, k: int) -> Acceptance:
        """Drafts of one row: ids [L], hidden [L, H]."""
        last = ids.shape[0] - 1 - k
        starts = torch.unique(torch.linspace(0, last, steps=min(STARTS, last + 1), device=ids.device).round().long())
        target = head.logits(hidden).argmax(-1)
        embedded = embedding(ids)
        context = ids.shape[0] - 1  # step 1 runs at every position: later steps attend to it
        inputs = self._join(embedded[1:], hidden[:-1])
        steps = torch.zeros(context, dtype=torch.long, device=ids.device)
        origin = torch.arange(context, device=ids.device)
        agree = torch.ones(starts.shape[0], dtype=torch.bool, device=ids.device)
        accepted = []
        for step in range(k):
            out = self._attend(inputs, origin, steps)
            at = out[starts] if step == 0 else out[-starts.shape[0] :]
            agree &= head.logits(at).argmax(-1) == target[starts + step + 1]
            accepted.append(int(agree.sum()))
            if step + 1 < k:
                inputs = torch.cat([inputs, self._join(embedded[starts + step + 2], at)])
                steps = torch.cat([steps, torch.full_like(starts, step + 1)])
                origin = torch.cat([origin, starts])
        return Acceptance(starts.shape[0], accepted)

    def _join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        parts = [self._norms["pre_fc_norm_embedding"](embedded), self._norms["pre_fc_norm_hidden"](hidden)]
        joined: Tensor = self._fc(torch.cat(parts, dim=-1))
        return joined

    def _attend(self, inputs: Tensor, origin: Tensor, steps: Tensor) -> Tensor:
        """The attention block over first steps and later steps of each start: a chain sees its own past only."""
        first = steps[None, :] == 0
        same_chain = (origin[:, None] == origin[None, :]) & (steps[None, :] <= steps[:, None])
        visible = (first & (origin[None, :] <= origin[:, None])) | same_chain
        mask = torch.zeros(visible.shape, dtype=inputs.dtype, device=inputs.device)
        mask.masked_fill_(~visible, torch.finfo(inputs.dtype).min)
        positions = origin + steps
        result = self._block(
            inputs[None],
            position_embeddings=self._model.positions(positions),
            attention_mask=mask[None, None],
            position_ids=positions[None],
        )
        out: Tensor = self._norms["norm"]((result[0] if isinstance(result, tuple) else result)[0])
        return out
