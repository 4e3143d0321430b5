"""What other quantizers can do, as a table: for the terminal, and in Markdown for the README."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sparkquant.quantizers import QUANTIZERS, Capability, capability_rows

if TYPE_CHECKING:
    from rich.console import RenderableType


def _told(row: Capability, family: str | None) -> str:
    if row.reason:
        return f"no: {row.reason}"
    families = [name for name in row.families if family in (None, name)]
    return ", ".join(families) if families else f"no: its blocks were never run through {QUANTIZERS[row.method].title}"


def backends_text(family: str | None) -> Iterator[RenderableType]:
    """One row for every scheme of every quantizer, and how each is installed."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("method", "scheme or option"):
        table.add_column(column, no_wrap=True)
    table.add_column("families that it does, or why it does none")
    for row in capability_rows():
        table.add_row(row.method, row.subject, _told(row, family))
    yield table
    yield Text("")
    for quantizer in QUANTIZERS.values():
        yield Text(f"{quantizer.title} {quantizer.version}: {quantizer.install}")


def backends_markdown() -> str:
    """The table of the README."""
    lines = ["| method | scheme or option | families, or why none |", "|---|---|---|"]
    lines += [f"| `{row.method}` | {row.subject} | {_told(row, None)} |" for row in capability_rows()]
    return "\n".join(lines) + "\n"
