"""What the charts of a report share, and the chart of bytes. Each is drawn for a phone and grows on larger screens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sparkquant.measured import Quality
from sparkquant.printable import size
from sparkquant.reporting.palette import DASHES, MARKERS, STAND_INS, scheme_color, series
from sparkquant.reporting.sheet import Sheet
from sparkquant.reporting.svg import drawn, figure
from sparkquant.reporting.tables import Chart, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 320
"""CSS pixels that a narrow phone leaves for a drawing: there a unit of it is about one pixel."""

HEIGHT = 215
BAR = 29

Named = Sequence[tuple[int, Sheet, Quality]]
"""Checkpoints with measured quality: their number in the report, and what it is."""


def color(name: str) -> str:
    """The stand-in of a variable."""
    return STAND_INS[name]


def measured(sheets: Sequence[Sheet]) -> Named:
    """Those that were evaluated."""
    return [(number, sheet, sheet.quality) for number, sheet in enumerate(sheets) if sheet.quality is not None]


def letter(number: int) -> str:
    """How a chart calls a checkpoint."""
    return chr(ord("A") + number) if number < 26 else str(number)


def called(number: int, sheets: Sequence[Sheet]) -> str:
    """A checkpoint's name, with its letter where there are several."""
    return sheets[number].name if len(sheets) == 1 else f"{letter(number)} {sheets[number].name}"


def short(number: int, sheets: Sequence[Sheet]) -> str:
    """The name for a legend, cut to what a phone can show."""
    name = called(number, sheets)
    return name if len(name) <= 36 else name[:35] + "…"


def line(number: int) -> dict[str, Any]:
    """How the line of a checkpoint looks: colour, marker and dash all differ."""
    kind = number % len(MARKERS)
    return {"color": color(series(number)), "marker": MARKERS[kind], "linestyle": DASHES[kind]}


def legend(axes: Axes) -> None:
    """Above the drawing, one name in a row: names are long and phones are narrow. A single line needs none."""
    if len(axes.get_legend_handles_labels()[0]) < 2:
        return
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, handlelength=2.6, labelspacing=0.25)


def chart(
    key: str, title: str, description: str, table: Table, draw: Callable[[], Figure] | None, *notes: str
) -> Chart:
    """Drawn, unless the caller wants words alone."""
    svg = "" if draw is None else drawn(draw, key, title, description)
    return Chart(key, title, description, table, svg, tuple(notes))


def bytes_chart(sheet: Sheet, number: int, widest: int, *, title: str, draw: bool) -> Chart:
    """Stored bytes by class and scheme, in front of what the same weights take at 16 bits."""
    contents = sheet.contents
    assert contents is not None
    rows = contents.rows

    def drawing() -> Figure:
        made = figure(WIDTH, 34 + BAR * len(rows))
        axes = made.subplots()
        axes.grid(False)
        axes.spines[["left", "bottom"]].set_visible(False)
        for place, row in enumerate(rows):
            axes.barh(place, row.plain_bytes, height=0.34, color="none", edgecolor=color("soft"), linewidth=0.8)
            axes.barh(place, row.bytes, height=0.34, color=color(scheme_color(row.scheme)))
            axes.text(0, place - 0.26, f"{row.layer_class} · {row.scheme}", va="bottom", ha="left", fontsize=10)
            axes.text(widest, place - 0.26, size(row.bytes), va="bottom", ha="right", fontsize=10)
        axes.set(ylim=(len(rows) - 0.5, -0.9), xlim=(0, widest), yticks=[], xticks=[])
        return made

    largest = rows[0]
    described = (
        f"{len(rows)} bars, one for each class and scheme. The largest is {largest.layer_class} in {largest.scheme}"
        f" with {size(largest.bytes)} of {size(contents.bytes)}. Outlines show the same weights at 16 bits."
    )
    cells = [
        (
            row.layer_class, row.scheme, f"{row.modules:,}", f"{row.parameters:,}", f"{row.bytes:,}",
            f"{row.bytes / contents.bytes:.1%}", f"{row.plain_bytes:,}",
        )
        for row in rows
    ]  # fmt: skip
    header = ("class", "scheme", "modules", "weights", "bytes", "share", "bytes at 16 bits")
    table = Table(f"Bytes by class and scheme in {sheet.name}", header, cells, words=(0, 1))
    key = f"bytes-{number}"
    return chart(key, title, described, table, drawing if draw else None)


def heads(named: Named, sheets: Sequence[Sheet]) -> list[str]:
    """Column heads of a table with one column for each checkpoint."""
    return [called(number, sheets) for number, _, _ in named]


def line_height(count: int) -> int:
    """Height of a chart with a legend of so many names."""
    return HEIGHT + 14 * count
