"""Whether rows can serve: enough tokens, thinking for a thinking model, whole conversations, no side that dominates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sparkquant.calibration.conversation import Reason
from sparkquant.calibration.mix import Mix
from sparkquant.calibration.rows import Row
from sparkquant.calibration.selection import Selection
from sparkquant.errors import CalibrationError, Problem
from sparkquant.report import Check, Status

ALLOWED = ("few-tokens", "no-thinking", "truncated", "empty-source")
"""Refusals that a caller may overrule."""

NULL_CONTENT = "null-content"
"""What a caller may allow besides: rendering `content: null` as an empty text."""

MAX_TRUNCATED = 0.2
MAX_ALIKE = 0.5
ALIKE_TOKENS = 64
MAX_DRIFT = 0.25


def demand_known(allow: Collection[str]) -> None:
    """CalibrationError when a name in `allow` is none of the refusals: a misspelled one would allow nothing."""
    unknown = [allow] if isinstance(allow, str) else sorted(set(allow) - {*ALLOWED, NULL_CONTENT})
    if unknown:
        raise CalibrationError(
            f"nothing to allow is called {', '.join(map(repr, unknown))}",
            hint=f"known: {', '.join((*ALLOWED, NULL_CONTENT))}",
        )


def token_checks(rows: Sequence[Row], config: Mapping[str, Any]) -> Iterator[Check]:
    """Enough tokens for this model, and few enough rows that were cut."""
    if not rows:
        yield Check("calibration.rows", Status.FAIL, "no row is left", measured=0)
        return
    tokens, needed = sum(row.length for row in rows), tokens_needed(config)
    if tokens < needed:
        message = f"{tokens:,} tokens; the widest layer of this model needs {needed:,} (two per input)"
        yield Check("calibration.few-tokens", Status.FAIL, message, measured=tokens, expected=needed)
    truncated = sum(row.truncated for row in rows)
    if truncated > MAX_TRUNCATED * len(rows):
        message = f"{truncated} of {len(rows)} rows are cut off inside a turn (at most {MAX_TRUNCATED:.0%} may be)"
        yield Check("calibration.truncated", Status.FAIL, message, measured=truncated, expected=MAX_TRUNCATED)
    alike = Counter(row.ids[:ALIKE_TOKENS] for row in rows).most_common(1)[0][1]
    if len(rows) > 2 and alike > MAX_ALIKE * len(rows):
        message = f"{alike} of {len(rows)} rows begin with the same {ALIKE_TOKENS} tokens"
        yield Check("calibration.alike", Status.WARN, message, measured=alike)
    yield from _expert_checks(tokens, config)


def _expert_checks(tokens: int, config: Mapping[str, Any]) -> Iterator[Check]:
    experts = config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts")
    active, width = config.get("num_experts_per_tok"), config.get("moe_intermediate_size") or 0
    if type(experts) is int and type(active) is int and experts > 0:
        each = tokens * active // experts
        if each < width:
            message = f"an expert sees about {each:,} tokens, fewer than its {width:,} inputs: take more or longer rows"
            yield Check("calibration.experts", Status.WARN, message, measured=each, expected=width)


def tokens_needed(config: Mapping[str, Any]) -> int:
    """Twice the inputs of the widest layer: with fewer tokens than inputs a Hessian says nothing of most directions."""

    def product(*names: str) -> int:
        size = 1
        for name in names:
            value = config.get(name)
            size *= value if type(value) is int and 0 < value < 2**24 else 0
        return size

    widths = (
        product("hidden_size"),
        product("intermediate_size"),
        product("num_attention_heads", "head_dim"),
        product("linear_num_value_heads", "linear_value_head_dim"),
    )
    return 2 * max(*widths, 1024 if not any(widths) else 0)


def selection_checks(mix: Mix, selection: Selection, *, wanted: int, thinking_model: bool) -> Iterator[Check]:
    """What only the making of the rows can tell."""
    yield from _dropped_checks(selection)
    rows = [row for _, row in selection.rows]
    if not rows:
        return
    if len(rows) < wanted:
        message = f"{len(rows)} rows of {wanted}: the sources hold no more"
        yield Check("calibration.short", Status.WARN, message, measured=len(rows), expected=wanted)
    if thinking_model and not any(row.thinking for row in rows):
        message = "no row holds reasoning, and the chat template is that of a thinking model"
        yield Check("calibration.no-thinking", Status.FAIL, message, measured=0)
    for name, count in selection.counts.items():
        if not count.rows and round(wanted * _declared(mix, name)) >= 1:
            message = f"source {name!r} gives no row: {count.read} read, {count.filtered} filtered out" + (
                f", {sum(count.dropped.values())} dropped" if count.dropped else ""
            )
            yield Check("calibration.empty-source", Status.FAIL, message, measured=0)
        given, declared = count.rows / len(rows), _declared(mix, name)
        if given - declared > MAX_DRIFT:
            message = f"source {name!r} gives {given:.0%} of the rows, declared is {declared:.0%}"
            yield Check(
                "calibration.dominant", Status.WARN, message, measured=round(given, 4), expected=round(declared, 4)
            )


def _dropped_checks(selection: Selection) -> Iterator[Check]:
    dropped = sum(sum(count.dropped.values()) for count in selection.counts.values())
    if dropped:
        yield Check("calibration.dropped", Status.WARN, f"{dropped} items serve no row", measured=dropped)
    null = sum(count.dropped[Reason.NULL_CONTENT] for count in selection.counts.values())
    if null:
        message = f"{null} items dropped because the template cannot take `content: null`"
        message += f"; most servers send an empty text instead: allow {NULL_CONTENT!r} does so here"
        yield Check("calibration.null-content", Status.WARN, message, measured=null)


def _declared(mix: Mix, name: str) -> float:
    return mix.sources[name].share / sum(source.share for source in mix.sources.values())


def refused(checks: Sequence[Check], allow: Collection[str]) -> tuple[Check, ...]:
    """The checks with allowed refusals turned into warnings."""

    def settled(check: Check) -> Check:
        overruled = check.status is Status.FAIL and check.id.removeprefix("calibration.") in allow
        if not overruled:
            return check
        message = f"{check.message} (allowed)"
        return Check(check.id, Status.WARN, message, check.tensors, check.measured, check.expected)

    return tuple(settled(check) for check in checks)


def raise_refusals(name: str, checks: Sequence[Check], problems: Sequence[Problem]) -> None:
    """CalibrationError when a check is red, with the names that overrule it."""
    red = [check for check in checks if check.status is Status.FAIL]
    if not red:
        return
    flags = [flag for check in red if (flag := check.id.removeprefix("calibration.")) in ALLOWED]
    hint = "`sparkquant calibration check` shows counts and rendered samples"
    if flags and len(flags) == len(red):
        names = ", ".join(f'"{flag}"' for flag in flags)
        options = " ".join(f"--allow {flag}" for flag in flags)
        hint = f"add data, or overrule with allow=[{names}] (`{options}`); {hint}"
    found = [Problem(check.id, check.message) for check in red]
    raise CalibrationError(f"calibration {name!r} cannot serve", hint=hint, problems=[*found, *problems])
