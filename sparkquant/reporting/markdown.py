"""The same report as Markdown: tables instead of charts."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from sparkquant.reporting.document import Document, SchemeMap, Section
from sparkquant.reporting.tables import Table

_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~])")


def escaped(text: str) -> str:
    """Foreign text as itself: neither markup nor HTML, and no end of a table cell."""
    return _SPECIAL.sub(r"\\\1", html.escape(text, quote=False))


def code(text: str) -> str:
    """A command in backticks, unless a name in it could end them, the cell, or begin markup."""
    return escaped(text) if set(text) & set("`|<>&") else f"`{text}`"


def markdown(document: Document) -> str:
    """The whole report."""
    from sparkquant import version

    lines = [
        f"<!-- sparkquant report, version {version()} -->",
        "",
        f"# {escaped(document.title)}",
        "",
        escaped(document.lead),
        "",
    ]
    for section in document.sections:
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> Iterator[str]:
    yield from (f"## {section.title}", "")
    if section.intro:
        yield from (section.intro, "")
    for told, command in section.absent:
        yield from (escaped(told) + (f" {code(command)} measures it." if command else ""), "")
    for table in section.tables:
        yield from _table(table)
    for chart in section.charts:
        yield from (f"### {escaped(chart.title)}", "", escaped(chart.description), "")
        for note in chart.notes:
            yield from (escaped(note), "")
        yield from _table(chart.table)
    for found in section.maps:
        yield from _map(found)
    for name, entries in section.lists:
        yield from (f"### {escaped(name)}", "", *(f"- {_cell(entry)}" for entry in entries), "")


def _table(table: Table) -> Iterator[str]:
    yield from (f"*{escaped(table.caption)}*", "")
    yield _row([escaped(cell) for cell in table.header])
    yield "|" + "|".join("---" if number in table.words else "---:" for number in range(len(table.header))) + "|"
    for row in table.rows:
        yield _row([_cell(text) for text in row])
    yield ""


def _map(found: SchemeMap) -> Iterator[str]:
    """Runs of equal layers share a row."""
    yield from (f"*{escaped(found.caption)}*", "")
    yield _row(["layer", *map(escaped, found.classes)])
    yield "|---" * (len(found.classes) + 1) + "|"
    runs: list[tuple[list[str], list[str]]] = []
    for layer, cells in found.rows:
        codes = ["" if cell is None else cell.code for cell in cells]
        if runs and runs[-1][1] == codes and layer.isdigit() and runs[-1][0][-1].isdigit():
            runs[-1][0].append(layer)
        else:
            runs.append(([layer], codes))
    for layers, codes in runs:
        yield _row([layers[0] if len(layers) == 1 else f"{layers[0]}–{layers[-1]}", *map(escaped, codes)])
    yield ""


def _cell(text: str) -> str:
    return code(text) if text.startswith("sparkquant ") else escaped(text)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
