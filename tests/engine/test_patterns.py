"""The automaton agrees with `re.match`, and never takes long."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.engine.patterns import Budget, Entries, Pattern, PatternError, compile_regex

NAMES = [
    "", "a", "mtp.fc", "model.language_model.layers.0.linear_attn.in_proj_ba", "visual.blocks.3.attn.qkv",
    "language_model.model.layers.12.self_attn.qkv_proj", "model.layers.3.mlp.experts.17.gate_proj", "lm_head",
]  # fmt: skip
PATTERNS = [
    r".*linear_attn\.in_proj_[ab]$", r".*mtp\..*", r"^mtp.*", r".*lm_head$", r"(?!.*mtp\.).*layers\.\d+\.mlp\.",
    r".*layers\.\d+\.mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up|down)_proj$", r"[^.]+\.\w+", r"\A\S*\Z", r"(?=m)mt",
    r".*layers\.(?:0|3|12)\.self_attn\.(?:q|k|v|qkv)_proj$", r"x.?$", r"\D*", r"(?:)", r"a{0}|b", r"(?i)MTP",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", NAMES)
def test_real_patterns_match_as_re_does(pattern: str, name: str) -> None:
    assert compile_regex(pattern).matches(name) == (re.match(pattern, name) is not None)


ATOMS = st.sampled_from(["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "[0-9]"])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: (
        st.builds("{}{}".format, inner, inner)
        | st.builds("(?:{}|{})".format, inner, inner)
        | st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{0,3}", "{1,}", "*?"]))
    ),
    max_leaves=8,
)


@given(REGEXES, st.sampled_from(["", "$"]), st.lists(st.text("ab.1_", max_size=8), max_size=8))
def test_any_pattern_matches_as_re_does(regex: str, end: str, names: list[str]) -> None:
    matcher = compile_regex(regex + end)
    for name in names:
        assert matcher.matches(name) == (re.match(regex + end, name) is not None)


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_is_a_pattern_or_an_error(pattern: str, name: str) -> None:
    with suppress(PatternError):
        compile_regex(pattern).matches(name)


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|a)*b", "(a+)+$", "(.*.*.*.*.*.*)x", "a?" * 400 + "a" * 400 + "b"])
def test_catastrophic_patterns_take_no_time(pattern: str) -> None:
    started = time.process_time()
    assert not compile_regex(pattern).matches("a" * 2000 + "c")
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "regular expression"),
        ("x" * 3000, "plausible"),
        ("(?:a{100}){100}", "too large"),
        ("(?P<a>x)(?P=a)", "back-reference"),
        ("(?i)(a+)+$", "nested"),
        (r"(?i)a*b*c*", "two repetitions"),
        ("(" * 1500 + ")" * 400, "regular expression|too deeply"),
    ],
)
def test_what_cannot_be_bounded_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=why):
        compile_regex(pattern)
    assert Pattern(f"re:{pattern}").fault
    assert not Pattern(f"re:{pattern}").matches("a")


def test_patterns_of_one_config_share_their_time() -> None:
    budget = Budget(2_000)
    pattern = Pattern("re:.*a.*b.*c$", budget)
    assert not pattern.fault
    assert not any(pattern.matches(f"{number}abd" * 9) for number in range(200))
    assert "too long" in pattern.fault


@given(st.lists(REGEXES, max_size=6), st.lists(st.text("ab.1_", max_size=8), max_size=8))
def test_a_list_matches_as_its_entries_do(regexes: list[str], names: list[str]) -> None:
    entries = Entries([Pattern(f"re:{regex}") for regex in [*regexes, r"(?!a)b"]])
    for name in names:
        assert entries.every(name) == [i for i, regex in enumerate([*regexes, r"(?!a)b"]) if re.match(regex, name)]


def test_entries_keep_their_order() -> None:
    entries = Entries([Pattern("b"), Pattern("re:.*a"), Pattern("a"), Pattern("Linear"), Pattern("b")])
    assert entries.first("a") == 1
    assert entries.first("a", exact_only=True) == 2
    assert entries.first("b") == 0
    assert entries.first("c") is None
    assert entries.every("b") == [0, 4]
    assert entries.first_class("QKVParallelLinear") == 1
    assert entries.first_class("ColumnParallel") == 1
    assert Entries([Pattern("embed"), Pattern("Linear")]).first_class("RowParallelLinear") == 1
    assert Entries([Pattern("Linear")]).first_class("ParallelLMHead") is None
    assert len(entries) == 5
    assert entries[1].is_regex
