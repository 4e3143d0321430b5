"""Several checkpoints beside each other: size against KL, and the difference row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkquant.measured import Quality
from sparkquant.printable import size
from sparkquant.reporting.charts import HEIGHT, WIDTH, chart, color, letter, measured, short
from sparkquant.reporting.palette import MARKERS, series
from sparkquant.reporting.sheet import Sheet
from sparkquant.reporting.svg import figure
from sparkquant.reporting.tables import Chart, Table, small
from sparkquant.rowwise import Paired, paired_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30
MIB = 2**20


def tradeoff_chart(sheets: Sequence[Sheet], *, draw: bool) -> Chart | None:
    """Size against KL, for two checkpoints or more that were measured on the same rows."""
    named = [(n, s, q) for n, s, q in measured(sheets) if s.contents is not None]
    named = [found for found in named if found[2].data == named[0][2].data]
    if len(named) < 2:
        return None
    sizes = {n: s.contents.bytes for n, s, _ in named if s.contents is not None}
    unit, name = (GIB, "GiB") if max(sizes.values()) >= GIB else (MIB, "MiB")

    def drawing() -> Figure:
        made = figure(WIDTH, HEIGHT + 14 * len(named))
        axes = made.subplots()
        for number, _, quality in named:
            axes.errorbar(
                sizes[number] / unit, quality.kl_mean, yerr=2 * (quality.kl_se or 0.0), color=color(series(number)),
                marker=MARKERS[number % len(MARKERS)], linestyle="none", capsize=3, label=short(number, sheets),
            )  # fmt: skip
            where = (sizes[number] / unit, quality.kl_mean)
            axes.annotate(letter(number), where, xytext=(7, 5), textcoords="offset points", fontweight="bold")
        axes.set(xlabel=name, ylabel="mean KL, nats", ylim=(0, None))
        axes.margins(x=0.12)
        axes.locator_params(axis="x", nbins=5)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, handlelength=1.2, labelspacing=0.25)
        return made

    best = min(named, key=lambda found: found[2].kl_mean)
    least = min(sizes, key=lambda number: sizes[number])
    described = (
        f"{len(named)} points. The lowest KL, {small(best[2].kl_mean)}, is that of {best[1].name};"
        f" the smallest is {sheets[least].name} with {size(sizes[least])}."
    )
    cells = [
        (f"{letter(n)} {s.name}", f"{sizes[n]:,}", small(q.kl_mean), "–" if q.kl_se is None else small(q.kl_se))
        for n, s, q in named
    ]
    table = Table("Size against mean KL, measured on the same rows", ("checkpoint", "bytes", "KL", "± s.e."), cells)
    left = [
        f"{letter(n)} was measured on other rows and is not in this chart."
        for n, _, q in measured(sheets)
        if q.data != named[0][2].data
    ]
    return chart(
        "tradeoff", "Size against KL", described, table, drawing if draw else None,
        "Bars span two standard errors over rows to each side; see the paired table for differences.", *left,
    )  # fmt: skip


def paired_with(a: Quality, b: Quality) -> Paired | None:
    """KL(b) - KL(a) row by row; None where the rows differ or are too few."""
    if a.data != b.data or len(a.kl_rows) != len(b.kl_rows) or len(a.kl_rows) < 2:
        return None
    return paired_rows(a.kl_rows, b.kl_rows)


def paired_table(sheets: Sequence[Sheet]) -> Table | None:
    """Each measured checkpoint against the first one; None for fewer than two."""
    named = measured(sheets)
    if len(named) < 2:
        return None
    number, first, base = named[0]
    cells = []
    for other, sheet, quality in named[1:]:
        found = paired_with(base, quality)
        head = f"{letter(other)} {sheet.name}"
        if found is None:
            cells.append((head, "measured on other rows", "", ""))
        else:
            clear = abs(found.mean) > 2 * found.se
            told = ("closer" if found.mean < 0 else "further away") if clear else "no clear difference"
            cells.append((head, told, f"{found.mean:+.5f} ± {found.se:.5f}", f"{found.rows:,}"))
    caption = f"KL to the source compared with {letter(number)} {first.name}, row by row"
    return Table(caption, ("checkpoint", "what it is", "difference in nats", "rows"), cells, words=(0, 1))
