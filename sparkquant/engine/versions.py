"""Which engine a user names, and by which version's rules it is judged."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparkquant.engine.kernels import parse_capability
from sparkquant.errors import UsageError
from sparkquant.layers import ENGINES

_NAMED = re.compile(r"(?:vllm\s*==?\s*)?v?(\d{1,4})\.(\d{1,4})(?:\.[0-9A-Za-z.+]{1,40})?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Engine:
    """`rules` is one of `layers.ENGINES`; `note` says when those are not the rules of `name` itself."""

    name: str
    rules: str
    note: str = ""


def engine_named(text: str) -> Engine:
    """`vllm==0.25.1`, `0.25.1` or `0.25`. Raises UsageError for a version whose rules were not read."""
    known = f"known: {', '.join(ENGINES)}, and the versions between them by the rules of the older neighbour"
    match = _NAMED.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"engine {text[:80]!r} is not like vllm==0.25.1", hint=known)
    wanted = (int(match[1]), int(match[2]))
    name = f"{match[1]}.{match[2]}"
    if name in ENGINES:
        return Engine(text.strip(), name)
    numbers = [tuple(map(int, version.split("."))) for version in ENGINES]
    if not min(numbers) < wanted < max(numbers):
        raise UsageError(f"the rules of vLLM {name} are not known here", hint=known)
    rules = ENGINES[max(i for i, number in enumerate(numbers) if number < wanted)]
    note = f"vLLM {name} was not read: judged by the rules of {rules}, which later versions changed somewhere"
    return Engine(text.strip(), rules, note)


def require_capability(text: str) -> None:
    """UsageError unless it is like 12.1."""
    try:
        parse_capability(text)
    except ValueError as error:
        raise UsageError(str(error), hint="GB10 is 12.1, Hopper 9.0, consumer Ampere 8.6") from None
