"""Charts of what `evaluate` measured: error by block, KL of single positions, acceptance of drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparkquant.reporting.charts import (
    WIDTH,
    Named,
    called,
    chart,
    color,
    heads,
    legend,
    line,
    line_height,
    measured,
    short,
)
from sparkquant.reporting.palette import DASHES, MARKERS, series
from sparkquant.reporting.sheet import Sheet
from sparkquant.reporting.svg import figure
from sparkquant.reporting.tables import Chart, Table, small

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def layers_chart(sheets: Sequence[Sheet], *, draw: bool) -> Chart | None:
    """Relative error of the hidden states behind each block."""
    named = [(n, s, q) for n, s, q in measured(sheets) if q.layers]
    if not named:
        return None
    depth = max(len(quality.layers) for _, _, quality in named)
    full = _full_attention(named[0][1]) & set(map(str, range(depth)))

    def drawing() -> Figure:
        made = figure(WIDTH, line_height(len(named)))
        axes = made.subplots()
        for block in full if len(full) < depth else ():
            axes.axvspan(int(block) - 0.5, int(block) + 0.5, color=color("line"), alpha=0.55, linewidth=0)
        for number, _, quality in named:
            style = line(number) | {"markevery": max(1, depth // 12), "label": short(number, sheets)}
            axes.plot(range(len(quality.layers)), quality.layers, clip_on=False, **style)
        axes.set(xlabel="block", ylabel="relative error", ylim=(0, None), xlim=(-0.5, depth - 0.5))
        axes.locator_params(axis="x", integer=True)
        legend(axes)
        return made

    _, sheet, quality = named[0]
    steps = [after - before for before, after in zip((0.0, *quality.layers[:-1]), quality.layers, strict=True)]
    worst = max(range(len(steps)), key=lambda index: steps[index])
    described = (
        f"Lines over {depth} blocks. In {sheet.name} the error behind the last block is {quality.layers[-1]:.4f};"
        f" block {worst} adds most, {steps[worst]:+.4f}."
    )
    cells = [(str(i), *(f"{q.layers[i]:.5f}" if i < len(q.layers) else "–" for _, _, q in named)) for i in range(depth)]
    table = Table("Relative error of the hidden states behind each block", ("block", *heads(named, sheets)), cells)
    notes = ("Shaded blocks have full attention, the others linear attention or a state space.",) if full else ()
    if len(full) == depth:
        notes = ()
    return chart("layers", "Error behind each block", described, table, drawing if draw else None, *notes)


def _full_attention(sheet: Sheet) -> set[str]:
    layers = {} if sheet.contents is None else sheet.contents.layers
    return {row for row, found in layers.items() if any(name.startswith(("attention.", "mla.")) for name in found)}


def histogram_chart(sheets: Sequence[Sheet], *, draw: bool) -> Chart | None:
    """Share of positions by their KL, on a logarithmic axis."""
    found = {n: q.kl_histogram for n, _, q in measured(sheets) if q.kl_histogram is not None and q.kl_histogram.whole}
    if not found:
        return None
    edges = next(iter(found.values())).edges
    named = [(n, s, q) for n, s, q in measured(sheets) if n in found and found[n].edges == edges]
    shares = {n: [count / sum(found[n].counts) for count in found[n].counts] for n, _, _ in named}
    used = [i for i in range(1, len(edges)) if any(share[i] > 0 for share in shares.values())]
    low, high = (min(used), max(used)) if used else (1, len(edges) - 1)

    def drawing() -> Figure:
        made = figure(WIDTH, line_height(len(named)))
        axes = made.subplots()
        for number, _, quality in named:
            values = [100 * share for share in shares[number][low : high + 1]]
            tint, dash = color(series(number)), DASHES[number % len(DASHES)]
            label = short(number, sheets)
            axes.stairs(values, edges[low - 1 : high + 1], label=label, color=tint, linestyle=dash, linewidth=1.8)
            if len(named) == 1:
                axes.stairs(values, edges[low - 1 : high + 1], fill=True, alpha=0.25, color=tint)
            mean = max(quality.kl_mean, edges[low - 1])
            axes.plot([mean], [0], marker=MARKERS[number % len(MARKERS)], color=tint, clip_on=False)
        axes.set(xscale="log", xlabel="KL of a position, nats", ylabel="% of positions", ylim=(0, None))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        legend(axes)
        return made

    number, sheet, quality = named[0]
    most = max(range(len(shares[number])), key=lambda i: shares[number][i])
    described = (
        f"In {sheet.name} most positions lie {_bin(edges, most)} nats; the mean is {small(quality.kl_mean)} and one"
        f" position in a hundred is above {small(quality.kl_p99)}."
    )
    cells = [
        (_bin(edges, i), *(f"{shares[n][i]:.3%}" for n, _, _ in named))
        for i in range(len(edges) + 1)
        if any(shares[n][i] > 0 for n, _, _ in named)
    ]
    table = Table("Share of positions by their KL", ("nats", *heads(named, sheets)), cells)
    notes = ["Symbols on the axis mark the means."]
    if below := ", ".join(f"{called(n, sheets)} {shares[n][0]:.1%}" for n, _, _ in named if shares[n][0] > 0):
        notes.append(f"Below {edges[0]:g} nats, and not drawn: {below}.")
    return chart("histogram", "KL of single positions", described, table, drawing if draw else None, *notes)


def _bin(edges: Sequence[float], index: int) -> str:
    if index == 0:
        return f"below {edges[0]:.3g}"
    if index == len(edges):
        return f"from {edges[-1]:.3g}"
    return f"{edges[index - 1]:.3g} to {edges[index]:.3g}"


def positions_chart(sheets: Sequence[Sheet], *, draw: bool) -> Chart | None:
    """Mean KL by the place in the row: an error in a recurrence grows with the context."""
    named = [(n, s, q) for n, s, q in measured(sheets) if q.kl_positions is not None and q.kl_positions.whole]
    if not named:
        return None
    places = {n: q.kl_positions for n, _, q in named if q.kl_positions is not None}
    longest = max(places.values(), key=lambda found: len(found.ends)).ends
    labels = [f"{a}–{b}" for a, b in zip((0, *longest), longest, strict=False)]
    named = [(n, s, q) for n, s, q in named if places[n].ends == longest[: len(places[n].ends)]]

    def drawing() -> Figure:
        made = figure(WIDTH, line_height(len(named)))
        axes = made.subplots()
        for number, _, _ in named:
            values = places[number].kl
            axes.plot(range(len(values)), values, label=short(number, sheets), clip_on=False, **line(number))
        axes.set_xticks(range(len(longest)), [f"to {end:,}" for end in longest])
        axes.set(xlabel="position in the row", ylabel="mean KL, nats", ylim=(0, None))
        legend(axes)
        return made

    number, sheet, _ = named[0]
    values = places[number].kl
    described = (
        f"In {sheet.name} the mean KL is {small(values[0])} at the first {longest[0]} positions and {small(values[-1])}"
        f" at the last ones, {labels[len(values) - 1]}."
    )
    cells = [
        (label, *(small(places[n].kl[i]) if i < len(places[n].kl) else "–" for n, _, _ in named),
         f"{max(places[n].tokens[i] for n, _, _ in named if i < len(places[n].tokens)):,}")
        for i, label in enumerate(labels)
    ]  # fmt: skip
    table = Table("Mean KL by place in the row", ("positions", *heads(named, sheets), "tokens"), cells)
    return chart("positions", "KL by place in the row", described, table, drawing if draw else None)


def acceptance_chart(sheets: Sequence[Sheet], *, draw: bool) -> Chart | None:
    """Share of drafts accepted up to each position, one panel for each set of rows; sources are dotted."""
    named = [(n, s, q) for n, s, q in measured(sheets) if any(any(r.values()) for r in q.acceptance.values())]
    if not named:
        return None
    sets = list(dict.fromkeys(name for _, _, q in named for name in q.acceptance))
    lines = {name: _lines(named, name) for name in sets}

    def drawing() -> Figure:
        made = figure(WIDTH, 160 * len(sets) + 20 + 14 * (len(named) + 1))
        panels = made.subplots(len(sets), 1, squeeze=False, sharex=True)[:, 0]
        for axes, name in zip(panels, sets, strict=True):
            _panel(axes, name, lines[name], sheets)
        panels[-1].set_xlabel("draft position")
        legend(panels[0])
        return made

    cells = [
        (f"{name}, {'source' if number < 0 else called(number, sheets)}",
         *(f"{rate:.1%}" for rate in rates), f"{drafts:,}")
        for name in sets
        for number, rates, drafts in lines[name]
    ]  # fmt: skip
    depth = max(len(rates) for found in lines.values() for _, rates, _ in found)
    cells = [(row[0], *row[1:-1], *["–"] * (depth + 2 - len(row)), row[-1]) for row in cells]
    table = Table(
        "Share of drafts accepted up to each position", ("rows", *map(str, range(1, depth + 1)), "drafts"), cells
    )
    first = lines[sets[0]]
    told = ", ".join(f"{'source' if n < 0 else sheets[n].name} {rates[0]:.1%}" for n, rates, _ in first)
    described = f"At the first position of the set {sets[0]}: {told}."
    return chart(
        "acceptance", "Drafts accepted, by position", described, table, drawing if draw else None,
        "Agreement of the draft head with its own model on given text, without an engine.",
    )  # fmt: skip


def _lines(named: Named, name: str) -> list[tuple[int, tuple[float, ...], int]]:
    """(number, rates, drafts) of one set; equal sources once, under -1."""
    found: list[tuple[int, tuple[float, ...], int]] = []
    for _, _, quality in named:
        rates: Mapping[str, tuple[float, ...]] = quality.acceptance.get(name, {})
        if rates.get("source") and (-1, rates["source"]) not in [(n, r) for n, r, _ in found]:
            found.append((-1, rates["source"], quality.drafts.get(name, 0)))
    for number, _, quality in named:
        if result := quality.acceptance.get(name, {}).get("result"):
            found.append((number, result, quality.drafts.get(name, 0)))
    return found


def _panel(axes: Axes, name: str, lines: Sequence[tuple[int, Sequence[float], int]], sheets: Sequence[Sheet]) -> None:
    for number, rates, _ in lines:
        places = range(1, len(rates) + 1)
        percent = [100 * rate for rate in rates]
        if number < 0:
            axes.plot(places, percent, label="source", color=color("soft"), linestyle=(0, (1, 2)), marker="x")
        else:
            axes.plot(places, percent, label=short(number, sheets), clip_on=False, **line(number))
    axes.set(ylim=(0, 100), ylabel="% accepted")
    axes.set_xticks(range(1, max(len(rates) for _, rates, _ in lines) + 1))
    axes.set_title(name, loc="right", fontsize=10, y=0.86)
