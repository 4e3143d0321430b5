"""Tables as data: what is behind a chart, for a page, for Markdown, and for whoever cannot see the chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """`rows` begin with their header cell; columns whose number is in `words` hold text, the others numbers."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)


@dataclass(frozen=True)
class Chart:
    """A drawing with its description in words and the numbers behind it.

    key    an id that is unique in its page
    svg    empty where nothing was drawn (Markdown)
    """

    key: str
    title: str
    description: str
    table: Table
    svg: str = ""
    notes: tuple[str, ...] = ()


def small(value: float) -> str:
    """A KL or an error with three digits: `0.0104`, `1.2e-05`."""
    return f"{value:.5f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
