"""`sparkquant diff`: the verb, and differences as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkquant.cli.progress import progress
from sparkquant.cli.shell import clean, show, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from sparkquant.changes import Held, QualityChange
    from sparkquant.comparison import Change, Difference

SHOWN = 40
"""Single changes that are listed; two formats of one model differ in thousands."""

QUALITY = {
    "kl_mean": ("KL mean, nats per token", ".5f"),
    "kl_p99": ("KL 99th percentile", ".4f"),
    "top1": ("same most likely token", ".2%"),
    "nll": ("NLL, nats per token", ".4f"),
    "exact_recall": ("exact recall", ".0f"),
    "first_draft": ("first draft accepted", ".1%"),
}


def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A checkpoint folder, plan file or recipe.", show_default=False)
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one, of the same kind.", show_default=False)],
    headers: Annotated[
        bool, typer.Option("--headers", help="Checkpoints by names, dtypes, shapes and config: no weight is read.")
    ] = False,
    source: Annotated[
        str | None, typer.Option("--source", metavar="SRC", help="Recipes: also what they would make of a checkpoint.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help=f"List every change, not the first {SHOWN}.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Say what differs between two checkpoints, two plans (`plan --out`) or two recipes.

    By class and in bytes, and one by one; of checkpoints that were evaluated
    also in quality, row by row where both saw the same rows. Checkpoints are
    read whole: every tensor's bytes are compared, unless --headers is given.

    \b
    Examples:
      sparkquant diff qwen-hybrid-w4a16 qwen-hybrid-w4a16-head
      sparkquant diff qwen-hybrid-w4a16 mine.yaml --source Qwen3.5-27B
      sparkquant diff Qwen3.5-27B-W4A16 Qwen3.5-27B-NVFP4
    """
    from sparkquant.comparison import diff as compare

    with progress() as listener:
        found = compare(a, b, headers=headers, source=source, listener=listener)
    if as_json:
        write_json(found.to_json())
    else:
        show(difference_text(found, every=every), soft_wrap=True)


def difference_text(difference: Difference, *, every: bool = False) -> Iterator[RenderableType]:
    """Classes and bytes, quality, and one line per change: `+` is only in b, `-` only in a, `~` in both."""
    from rich.text import Text

    count = len(difference.changes)
    named = clean(f"{difference.kind} {difference.a} -> {difference.b}")
    yield Text(f"{named}: {count or 'no'} difference{'s' * (count != 1)}", "bold")
    yield Text(clean(f"compared: {difference.compared}"), "dim")
    if any(change.changed for change in difference.classes):
        yield Text()
        yield _classes(difference)
    if difference.quality is not None:
        yield Text()
        yield from _quality(difference.quality)
    if difference.changes and (difference.classes or difference.quality):
        yield Text()
    shown = difference.changes if every else difference.changes[:SHOWN]
    yield from map(_line, shown)
    if len(shown) < count:
        yield Text(f"and {count - len(shown):,} more (--all or --json lists them)", "dim")


def _table(*columns: str, words: int = 1) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right", no_wrap=True)
    return table


def _classes(difference: Difference) -> Table:
    from sparkquant.cli.tables import size

    sized = None not in difference.bytes
    table = _table("class", "before", "after", *(("bytes before", "after", "change") if sized else ()), words=3)
    for change in difference.classes:
        if change.changed:
            sizes = [sum(held.bytes or 0 for held in side) for side in (change.before, change.after)]
            told = (size(sizes[0]), size(sizes[1]), _share(*sizes)) if sized else ()
            table.add_row(change.layer_class, _schemes(change.before), _schemes(change.after), *told)
    same = sum(not change.changed for change in difference.classes)
    before, after = difference.bytes
    if before is not None and after is not None:
        table.add_row("total", "", "", size(before), size(after), _share(before, after), style="bold")
    if same:
        table.add_row(f"{same} equal", style="dim")
    return table


def _schemes(side: Sequence[Held]) -> str:
    """`fp8 x3, keep x1`; without counts where a recipe has none."""
    if len(side) == 1:
        return clean(side[0].scheme)
    return clean(", ".join(f"{held.scheme} x{held.count}" for held in side)) or "-"


def _share(before: int, after: int) -> str:
    return f"{after / before - 1:+.1%}" if before else "new"


def _quality(quality: QualityChange) -> Iterator[RenderableType]:
    from rich.text import Text

    table = _table("quality, as evaluated", "before", "after", "difference")
    for name, (before, after) in quality.numbers.items():
        label, form = QUALITY[name]
        change = "" if before is None or after is None else f"{after - before:+{form}}"
        if name == "kl_mean" and quality.paired is not None:
            change = f"{quality.paired.mean:+.5f} ± {quality.paired.se:.5f}"
        if before is not None or after is not None:
            table.add_row(label, *("" if value is None else f"{value:{form}}" for value in (before, after)), change)
    if table.row_count:
        yield table
    if quality.paired is not None:
        yield Text(f"KL row by row, over {quality.paired.rows:,} rows; ± is one standard error", "dim")
    if quality.why:
        yield Text(f"note: {clean(quality.why)}", "yellow")


def _line(change: Change) -> RenderableType:
    from rich.text import Text

    if change.before is None:
        return Text(clean(f"+ {change.what}: {_value(change.after)}"), "green")
    if change.after is None:
        return Text(clean(f"- {change.what}: {_value(change.before)}"), "red")
    return Text(clean(f"~ {change.what}: {_value(change.before)} -> {_value(change.after)}"))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(inner)}" for key, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
