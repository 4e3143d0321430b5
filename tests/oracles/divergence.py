"""How far a quantized model is from its source, in the models' own library: KL(source || quantized) per row of ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

ROWS, TOKENS, BATCH = 24, 512, 8


def heldout_rows(file: Path, *, rows: int = ROWS, tokens: int = TOKENS) -> list[list[int]]:
    """The first rows of a held-out file that are long enough, cut to `tokens` ids."""
    stored: list[list[int]] = json.loads(file.read_text())
    return [row[:tokens] for row in stored if len(row) >= tokens][:rows]


@contextmanager
def _one_thread() -> Iterator[None]:
    """The reference kernels make thousands of small calls: on a busy machine more threads wait than compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def log_probabilities(model: nn.Module, rows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """[L, V] of every row, computed and kept in float32. The rows have one length: nothing is padded."""
    model = model.float()
    for start in range(0, len(rows), BATCH):
        with torch.no_grad(), _one_thread():
            logits: Tensor = model(input_ids=torch.tensor(rows[start : start + BATCH]), use_cache=False).logits
        yield from logits.log_softmax(-1)


def divergences(source: Iterable[Tensor], quantized: Iterable[Tensor]) -> list[float]:
    """Mean KL(source || quantized) of every row, in nats per token, from both sides' log probabilities."""
    pairs = zip(source, quantized, strict=True)
    return [float((before.exp() * (before - after)).sum(-1).mean()) for before, after in pairs]


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)
