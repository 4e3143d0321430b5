"""Positions by their KL and by their place in the row, against counting by hand and against the rows' own numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sparkquant.divergence import EDGES, by_position, histogram
from sparkquant.evaluation import Evaluation


def test_edges_rise_by_a_quarter_of_a_power_of_ten() -> None:
    assert (EDGES[0], EDGES[-1]) == (1e-7, 100)
    assert all(1.7 < b / a < 1.85 for a, b in pairwise(EDGES))


def test_a_value_lies_behind_the_edge_that_it_is_equal_to() -> None:
    values = [-1e-9, 0.0, 1e-7, 9.9e-7, 1.0, 99.0, 100.0, 1e6]
    found = histogram(torch.tensor(values, dtype=torch.float64))
    assert len(found.counts) == len(EDGES) + 1
    for bin_, count in enumerate(found.counts):
        low = EDGES[bin_ - 1] if bin_ else float("-inf")
        high = EDGES[bin_] if bin_ < len(EDGES) else float("inf")
        assert count == sum(low <= value < high for value in values)


def test_ranges_double_and_end_with_the_longest_row() -> None:
    rows = [torch.arange(300.0), torch.arange(100.0) + 1, torch.tensor([5.0])]
    parts = [(0, rows[0][:130]), (130, rows[0][130:]), (0, rows[1]), (0, rows[2])]
    found = by_position(parts)
    assert found.ends == (64, 128, 256, 300)
    assert found.tokens == (64 + 64 + 1, 64 + 36, 128, 44)
    for (a, b), mean in zip(pairwise((0, *found.ends)), found.kl, strict=True):
        assert mean == pytest.approx(float(torch.cat([row[a:b] for row in rows]).mean()))
    assert by_position([]).ends == ()


def test_an_evaluation_records_both(measured: Evaluation) -> None:
    assert measured.kl_histogram is not None
    assert measured.kl_positions is not None
    assert sum(measured.kl_histogram.counts) == sum(measured.kl_positions.tokens) == measured.tokens
    below = sum(c for e, c in zip(measured.kl_histogram.edges, measured.kl_histogram.counts, strict=False) if e <= 1)
    assert below / measured.tokens > 0.98
    whole = sum(k * n for k, n in zip(measured.kl_positions.kl, measured.kl_positions.tokens, strict=True))
    lengths = [160, 192, 192, 131]
    assert whole == pytest.approx(sum(k * n for k, n in zip(measured.kl_rows, lengths, strict=True)), rel=1e-5)
