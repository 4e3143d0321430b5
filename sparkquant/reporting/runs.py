"""What ran on an engine: the control runs of `validate`, with the conditions that they hold under."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkquant.measured import Controls, RunOf
from sparkquant.printable import clean
from sparkquant.reporting.charts import BAR, WIDTH, called, chart, color
from sparkquant.reporting.sheet import Sheet
from sparkquant.reporting.svg import figure
from sparkquant.reporting.tables import Chart, Table, small

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = 1e-7
"""Nats below which two runs count as equal in a drawing."""

MOST_ROWS = 60

_WORDS = {True: "yes", False: "no", None: "–"}


def controlled(sheets: Sequence[Sheet]) -> list[tuple[int, Controls]]:
    """Checkpoints that were validated."""
    return [(number, sheet.controls) for number, sheet in enumerate(sheets) if sheet.controls is not None]


def control_chart(sheet: Sheet, number: int, *, title: str, draw: bool) -> Chart | None:
    """How far each control is from the candidate, and each run from the reference."""
    controls = sheet.controls
    assert controls is not None
    near = [(f"candidate to {role}", found) for role, found in controls.to_controls.items() if found is not None]
    far = [(f"reference to {role}", found) for role, found in controls.to_reference.items() if found is not None]
    rows = [(clean(name), found, tint) for part, tint in ((near, "a"), (far, "b")) for name, found in part]
    if not rows:
        return None

    def drawing() -> Figure:
        made = figure(WIDTH, 60 + BAR * len(rows))
        axes = made.subplots()
        axes.grid(True, axis="x")
        axes.spines[["left"]].set_visible(False)
        left = min(LEAST, *(max(found.kl, LEAST) for _, found, _ in rows))
        for place, (name, found, tint) in enumerate(rows):
            value = max(found.kl, LEAST)
            axes.plot([left, value], [place, place], color=color("line"), linewidth=1)
            axes.plot([value], [place], marker="o" if tint == "a" else "s", color=color(tint), clip_on=False)
            axes.text(left, place - 0.16, f"{name}: {small(found.kl)}", va="bottom", ha="left")
        axes.set(xscale="log", xlabel="KL, nats per token", ylim=(len(rows) - 0.5, -0.9), yticks=[])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        return made

    worst = max(near or far, key=lambda pair: pair[1].kl)
    described = (
        f"{len(rows)} distances between runs. The largest to a control: {clean(worst[0])}, {small(worst[1].kl)}."
    )
    cells = [
        (
            name,
            small(found.kl),
            "–" if found.kl_se is None else small(found.kl_se),
            f"{found.top1:.2%}",
            f"{found.rows:,}",
        )
        for name, found, _ in rows
    ]
    table = Table("Distances between runs", ("runs", "KL", "± s.e.", "same token", "rows"), cells)
    return chart(f"controls-{number}", title, described, table, drawing if draw else None)


def runs_table(sheets: Sequence[Sheet]) -> Table | None:
    """Every run: kernels, graphs, answers that were broken or failed."""
    rows = [
        (clean(role), *([called(number, sheets)] if len(sheets) > 1 else []), *_run(run))
        for number, controls in controlled(sheets)
        for role, run in controls.runs.items()
    ]
    if not rows:
        return None
    header = ("run", *(["checkpoint"] if len(sheets) > 1 else []), "kernels, by the log", "graphs", "answers", "fault")
    return Table("Control runs", header, rows, words=range(len(header)))


def _run(run: RunOf) -> Iterator[str]:
    yield clean(run.kernel_names) or "–"
    yield {True: "no, eager", False: "yes", None: "–"}[run.eager]
    yield ", ".join(
        f"{found.sound} of {found.asked} sound at {concurrency}"
        for concurrency, found in run.answers.items()
    ) or "–"  # fmt: skip
    yield clean(run.failed) or "–"


def verdict_table(sheets: Sequence[Sheet]) -> Table | None:
    """What was proven, and what to do next."""
    rows = [
        (called(number, sheets), clean(told.verdict.outcome), clean(told.verdict.summary), clean(told.verdict.next))
        for number, told in controlled(sheets)
    ]
    header = ("checkpoint", "verdict", "why", "next")
    return Table("What validate proved", header, rows, words=range(4)) if rows else None


def conditions_table(
    sheets: Sequence[Sheet], found: Sequence[tuple[int, Mapping[str, Any]]], caption: str
) -> Table | None:
    """Conditions by name, one column for each checkpoint."""
    columns = {number: dict(list(flat(conditions))[:MOST_ROWS]) for number, conditions in found}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    if not names:
        return None
    rows = [(name, *(column.get(name, "–") for column in columns.values())) for name in names]
    header = ("condition", *(called(number, sheets) for number in columns))
    return Table(caption, header, rows, words=range(len(header)))


def flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested conditions as (name, text), lists on one line; variables of the environment keep their spelling."""
    for key, value in fields.items():
        name = prefix + (clean(key) if str(key).isupper() else clean(key).replace("_", " "))
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}, ")
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            yield from flat({str(number): item for number, item in enumerate(value, 1)}, f"{name} ")
        elif isinstance(value, list | tuple):
            yield name, clean(" ".join(map(str, value))) or "–"
        else:
            yield name, _WORDS[value] if value is None or isinstance(value, bool) else clean(value)
