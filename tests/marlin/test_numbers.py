"""KL from truncated lists: a lower bound that is one, exact where nothing is hidden."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.marlin.metrics import parse_metrics
from sparkquant.marlin.numbers import divergence

VOCABULARY = 40


def distribution(seed: int, spread: float) -> list[float]:
    source = random.Random(seed)
    logits = [source.gauss(0, spread) for _ in range(VOCABULARY)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def top(values: list[float], count: int, actual: int) -> dict[int, float]:
    best = sorted(range(VOCABULARY), key=lambda token: -values[token])[:count]
    return {token: values[token] for token in {*best, actual}}


def exact(p: list[float], q: list[float]) -> float:
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, VOCABULARY))
def test_it_is_a_lower_bound_and_exact_when_everything_is_sent(one: int, other: int, count: int) -> None:
    p, q = distribution(one, 2.0), distribution(other, 2.0)
    found = divergence([[top(p, count, 3)]], [[top(q, count, 3)]], [[0, 3]])
    assert found is not None
    assert found.kl <= exact(p, q) + 1e-9
    assert found.kl <= found.kl_high + 1e-9
    if count == VOCABULARY:
        assert found.kl == pytest.approx(exact(p, q), abs=1e-9)
        assert found.unseen == pytest.approx(0, abs=1e-9)


def test_equal_runs_do_not_differ_however_little_is_sent() -> None:
    p = distribution(1, 3.0)
    found = divergence([[top(p, 5, 7)]], [[top(p, 5, 7)]], [[0, 7]])
    assert found is not None
    assert (found.kl, found.top1, found.kl_se) == (0.0, 1.0, None)
    assert found.unseen > 0
    assert found.nll == (-p[7], -p[7])


def test_rows_count_once_whatever_their_length() -> None:
    p, q = distribution(1, 2.0), distribution(2, 2.0)
    a = [[top(p, 40, 0)] * 9, [top(p, 40, 0)]]
    b = [[top(q, 40, 0)] * 9, [top(p, 40, 0)]]
    found = divergence(a, b, [[0] * 10, [0] * 2])
    assert found is not None
    assert found.kl == pytest.approx(exact(p, q) / 2)
    assert found.positions == 10


def test_nothing_to_compare_is_none() -> None:
    assert divergence([[]], [[]], [[0, 1]]) is None
    assert divergence([[{1: -1.0}]], [[]], [[0, 1]]) is None


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2.0
vllm:prefix_cache_queries_total{engine="0",model_name="a,b \\"c\\""} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 25.0
vllm:cache_config_info{block_size="144",enable_prefix_caching="False",kv_cache_size_tokens="881810"} 1.0
python_info{version="3"} 1.0
vllm:request_prompt_tokens_bucket{le="1.0"} 0.0
not a line
"""


def test_metrics_as_a_server_of_0_25_writes_them() -> None:
    found, empty = parse_metrics(METRICS), parse_metrics("")
    accepted = found.acceptance(empty)
    assert accepted is not None
    assert (accepted.drafts, accepted.drafted, accepted.accepted, accepted.rates) == (10, 20, 8, (0.6, 0.2))
    assert accepted.length == 1.8
    assert found.cache_hit_rate(empty) == 0.25
    assert found.cache["kv_cache_size_tokens"] == "881810"
    assert "request_prompt_tokens_bucket" not in found.counters
    assert found.acceptance(found) is not None
    assert empty.acceptance(empty) is None
    assert not empty.known


@given(st.text(max_size=300))
def test_any_page_can_be_read(text: str) -> None:
    parse_metrics(text)


INFINITE = {0: -math.inf, 1: math.log(0.5), 2: math.log(0.5)}
"""A token that cannot come."""


def test_what_cannot_come_is_far_and_no_nan() -> None:
    sure = {0: math.log(0.5), 1: math.log(0.25), 2: math.log(0.25)}
    for p, q in ((sure, INFINITE), (INFINITE, sure), (INFINITE, INFINITE)):
        found = divergence([[p]], [[q]], [[1, 2]])
        assert found is not None
        assert math.isfinite(found.kl)
        assert math.isfinite(found.kl_high)
        assert (found.kl > 1) == (p is sure), "what the reference says half of the time cannot come: never near"


def test_counters_that_are_no_numbers_or_go_back_count_nothing() -> None:
    page = """
vllm:spec_decode_num_drafts_total NaN
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} +Inf
vllm:generation_tokens_total{engine="0"} 5
"""
    assert parse_metrics(page).counters == {"generation_tokens": 5.0}
    before = parse_metrics("vllm:spec_decode_num_drafts_total 100\nvllm:prefix_cache_queries_total 50\n")
    after = parse_metrics("vllm:spec_decode_num_drafts_total 3\nvllm:prefix_cache_queries_total 2\n")
    assert after.acceptance(before) is None
    assert after.cache_hit_rate(before) is None
