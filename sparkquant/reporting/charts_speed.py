"""The chart of throughput: one stream by kind of prompt, all streams by how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkquant.measured import RoundsOf, Throughput
from sparkquant.printable import clean
from sparkquant.reporting.charts import WIDTH, called, chart, color, legend, line, short
from sparkquant.reporting.sheet import Sheet
from sparkquant.reporting.svg import figure
from sparkquant.reporting.tables import Chart, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def timed(sheets: Sequence[Sheet]) -> list[tuple[int, Throughput]]:
    """Checkpoints with a benchmark."""
    return [(number, sheet.throughput) for number, sheet in enumerate(sheets) if sheet.throughput is not None]


def speed_chart(sheets: Sequence[Sheet], *, draw: bool) -> Chart | None:
    """Tokens per second: medians, with lines from the slowest round to the fastest."""
    named = timed(sheets)
    if not named:
        return None
    kinds = list(dict.fromkeys(kind for _, told in named for kind in told.decode))
    widths = sorted({width for _, told in named for width in told.aggregate}, key=lambda w: (len(w), w))

    def drawing() -> Figure:
        made = figure(WIDTH, 380 + 14 * len(named))
        upper, lower = made.subplots(2, 1)
        for place, (number, told) in enumerate(named):
            shift = 0.16 * (place - (len(named) - 1) / 2)
            _rounds(upper, [told.decode.get(kind) for kind in kinds], shift, short(number, sheets), number)
            _rounds(
                lower, [told.aggregate.get(width) for width in widths], 0, short(number, sheets), number, joined=True
            )
        upper.set_xticks(range(len(kinds)), [clean(kind) for kind in kinds])
        upper.set(ylabel="tokens/s, one stream", ylim=(0, None), xlim=(-0.5, len(kinds) - 0.5))
        lower.set_xticks(range(len(widths)), [clean(width) for width in widths])
        lower.set(xlabel="streams", ylabel="tokens/s, all streams", ylim=(0, None))
        legend(upper)
        return made

    number, told = named[0]
    best = max(told.decode, key=lambda kind: told.decode[kind].median)
    described = (
        f"{called(number, sheets)}: {told.decode[best].median:.1f} tokens per second in one stream ({clean(best)}), the"
        f" first token after {told.first_token.median:.3f} seconds."
    )
    rows = [("one stream, " + clean(kind), *(_cell(t.decode.get(kind)) for _, t in named)) for kind in kinds]
    rows += [
        (f"{clean(width)} streams together", *(_cell(t.aggregate.get(width)) for _, t in named)) for width in widths
    ]
    rows.append(("prefill", *(_cell(t.prefill) for _, t in named)))
    rows.append(("seconds to the first token", *(_cell(t.first_token, 3) for _, t in named)))
    header = ("tokens per second", *(called(n, sheets) for n, _ in named))
    table = Table("Medians, and the slowest and fastest round", header, rows)
    return chart(
        "throughput", "Tokens per second", described, table, drawing if draw else None,
        "Symbols are medians, upright lines span the rounds.",
    )  # fmt: skip


def _rounds(
    axes: Axes, found: Sequence[RoundsOf | None], shift: float, label: str, number: int, *, joined: bool = False
) -> None:
    present = [(place + shift, rounds) for place, rounds in enumerate(found) if rounds is not None]
    places, medians = [place for place, _ in present], [rounds.median for _, rounds in present]
    style = line(number) if joined else line(number) | {"linestyle": "none"}
    axes.plot(places, medians, label=label, clip_on=False, **style)
    low, high = [min(rounds.rounds) for _, rounds in present], [max(rounds.rounds) for _, rounds in present]
    axes.vlines(places, low, high, color=color("soft"), linewidth=1)


def _cell(found: RoundsOf | None, digits: int = 1) -> str:
    if found is None:
        return "–"
    return f"{found.median:,.{digits}f} ({min(found.rounds):,.{digits}f} to {max(found.rounds):,.{digits}f})"
