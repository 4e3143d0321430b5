"""How far a quantized model is from its source, in the models' own library: KL(source || quantized) per row of ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

ROWS, TOKENS = 24, 512


def heldout_rows(file: Path, *, rows: int = ROWS, tokens: int = TOKENS) -> list[list[int]]:
    """The first rows of a held-out file that are long enough, cut to `tokens` ids."""
    stored: list[list[int]] = json.loads(file.read_text())
    return [row[:tokens] for row in stored if len(row) >= tokens][:rows]


def log_probabilities(model: nn.Module, row: Sequence[int]) -> Tensor:
    """[L, V] in float32."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def divergences(source: nn.Module, quantized: nn.Module, rows: Sequence[Sequence[int]]) -> list[float]:
    """Mean KL(source || quantized) of every row, in nats per token; both run in float32."""
    source, quantized = source.float(), quantized.float()
    found = []
    for row in rows:
        before, after = log_probabilities(source, row), log_probabilities(quantized, row)
        found.append(float((before.exp() * (before - after)).sum(-1).mean()))
    return found


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)
