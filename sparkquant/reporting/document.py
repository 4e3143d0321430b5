"""A report as data: sections with charts, tables and scheme maps. Page and Markdown are two views of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sparkquant.contents import OUTSIDE, Contents
from sparkquant.printable import clean, size
from sparkquant.reporting.charts import bytes_chart, called
from sparkquant.reporting.charts_compared import paired_table, tradeoff_chart
from sparkquant.reporting.charts_quality import acceptance_chart, histogram_chart, layers_chart, positions_chart
from sparkquant.reporting.charts_speed import speed_chart, timed
from sparkquant.reporting.palette import scheme_codes, scheme_color
from sparkquant.reporting.runs import conditions_table, control_chart, controlled, runs_table, verdict_table
from sparkquant.reporting.sheet import Sheet
from sparkquant.reporting.tables import Chart, Table

NONE = "–"


@dataclass(frozen=True)
class Cell:
    """A layer's schemes in one class: the code shown, the variable that colours it, the labels in full."""

    code: str
    color: str
    label: str


@dataclass(frozen=True)
class SchemeMap:
    """Rows are layers, columns are classes; a cell is None where the layer has nothing of the class."""

    key: str
    caption: str
    classes: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell | None]]]


@dataclass(frozen=True)
class Section:
    """A part of the page. `absent` says what is missing here and which command would measure it."""

    key: str
    title: str
    intro: str = ""
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    maps: Sequence[SchemeMap] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()
    absent: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Document:
    """Title, what it is about, and the sections in reading order."""

    title: str
    lead: str
    sections: Sequence[Section] = field(default_factory=tuple)


def document_of(sheets: Sequence[Sheet], *, draw: bool) -> Document:
    """Everything that is known of the checkpoints; without `draw` the charts are tables alone."""
    names = [sheet.name for sheet in sheets]
    title = names[0] if len(names) == 1 else f"{len(names)} checkpoints compared"
    models = ", ".join(dict.fromkeys(sheet.model_type for sheet in sheets))
    lead = f"{models}: what is stored, what was checked, and what quantization cost. Only what was measured is shown."
    sections = [
        Section("glance", "At a glance", tables=[_glance(sheets)]),
        *([_comparison(sheets, draw)] if len(sheets) > 1 else []),
        _evidence(sheets),
        _bytes(sheets, draw),
        _schemes(sheets),
        _quality(sheets, draw),
        _drafts(sheets, draw),
        _controls(sheets, draw),
        _speed(sheets, draw),
        *_notes(sheets),
    ]
    return Document(title, lead, sections)


def _glance(sheets: Sequence[Sheet]) -> Table:
    columns = [dict(_facts(sheet)) for sheet in sheets]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, NONE) for column in columns)) for name in names]
    heads = [called(number, sheets) for number in range(len(sheets))]
    return Table("The checkpoint in numbers", ("", *heads), rows)


def _facts(sheet: Sheet) -> Iterator[tuple[str, str]]:
    if sheet.contents is not None:
        yield "size of the tensors", size(sheet.contents.bytes)
        yield "bits per weight", f"{sheet.contents.bits_per_weight:.2f}"
    yield "recipe", sheet.recipe.get("name", "unknown: made elsewhere")
    yield "method", sheet.recipe.get("method", NONE)
    quality = sheet.quality
    if quality is None:
        yield "KL to the source, nats per token", "not measured"
        return
    error = "" if quality.kl_se is None else f" ± {quality.kl_se:.5f}"
    yield "KL to the source, nats per token", f"{quality.kl_mean:.5f}{error}"
    yield "KL, 99th percentile", f"{quality.kl_p99:.4f}"
    yield "same most likely token", f"{quality.top1:.2%}"
    if {"source", "result"} <= quality.nll.keys():
        yield "NLL, source and result", f"{quality.nll['source']:.4f} and {quality.nll['result']:.4f}"
    if quality.recall.get("tasks"):
        exact = f"{quality.recall.get('result', 0)} of {quality.recall['tasks']}"
        yield "exact recall", f"{exact} (source {quality.recall.get('source', 0)})"
    before, after = quality.first_position("source"), quality.first_position("result")
    if before is not None and after is not None:
        yield "first draft accepted, source and result", f"{before:.1%} and {after:.1%}"
    yield "measured on", f"{quality.rows:,} rows, {quality.tokens:,} tokens"


def _comparison(sheets: Sequence[Sheet], draw: bool) -> Section:
    found, paired = tradeoff_chart(sheets, draw=draw), paired_table(sheets)
    intro = "Rows differ far more than checkpoints do, so differences are taken row by row; ± is one standard error."
    absent = [] if paired else [("No comparison of quality: fewer than two of these were evaluated.", _ask(sheets))]
    return Section(
        "compared", "Compared", intro, [paired] if paired else [], [found] if found else [], absent=absent
    )  # fmt: skip


def _ask(sheets: Sequence[Sheet]) -> str:
    return next((sheet for sheet in sheets if sheet.quality is None), sheets[0]).command("evaluate")


def _evidence(sheets: Sequence[Sheet]) -> Section:
    if len(sheets) == 1:
        header: Sequence[str] = ("verb", "result", "date", "next, or why")
        rows = [(row.verb, row.state, row.date[:10] or NONE, row.next or row.why) for row in sheets[0].rows]
    else:
        header = ("verb", *(called(number, sheets) for number in range(len(sheets))))
        rows = [(found[0].verb, *(row.state for row in found)) for found in zip(*(s.rows for s in sheets), strict=True)]
    table = Table("What each verb found, for the files as they are now", header, rows, words=range(len(header)))
    intro = (
        "A record is bound to the digest of the checkpoint. Stale ones are about other files than these, and none of"
        " their numbers are shown."
    )
    lists = []
    if faults := [f"{called(n, sheets)}: {problem}" for n, sheet in enumerate(sheets) for problem in sheet.problems]:
        lists.append(("What could not be read", faults))
    if len(sheets) > 1 and (wanted := [row.next for sheet in sheets for row in sheet.rows if row.next]):
        lists.append(("What to run next", wanted))
    return Section("evidence", "Evidence", intro, [table], lists=lists)


def _bytes(sheets: Sequence[Sheet], draw: bool) -> Section:
    readable = [(number, sheet.contents) for number, sheet in enumerate(sheets) if sheet.contents is not None]
    widest = max((row.plain_bytes for _, found in readable for row in found.rows), default=1)
    widest = max(widest, *(row.bytes for _, found in readable for row in found.rows), 1)
    charts = [
        bytes_chart(sheets[number], number, widest, title=f"Bytes in {called(number, sheets)}", draw=draw)
        for number, found in readable
        if found.rows
    ]
    absent = [
        (f"{called(number, sheets)}: its quantization is of a kind that is not read here.", "")
        for number, sheet in enumerate(sheets)
        if sheet.contents is None
    ]
    intro = "Filled bars are the bytes that are stored, outlines what the same weights take at 16 bits."
    return Section("bytes", "Where the bytes are", intro, charts=charts, absent=absent)


def _schemes(sheets: Sequence[Sheet]) -> Section:
    readable = [(number, sheet.contents) for number, sheet in enumerate(sheets) if sheet.contents is not None]
    labels = list(dict.fromkeys(label for _, found in readable for label in found.schemes))
    codes = scheme_codes(labels)
    maps = []
    for number, found in readable:
        rows = [
            (
                "outside" if layer == OUTSIDE else layer,
                [_cell(row[name], codes) if name in row else None for name in found.classes],
            )
            for layer, row in found.layers.items()
        ]
        maps.append(SchemeMap(f"map-{number}", f"Schemes by layer in {called(number, sheets)}", found.classes, rows))
    legend = Table(
        "Codes of the map",
        ("code", "scheme", *(called(number, sheets) for number, _ in readable)),
        [(codes[label], label, *(size(_bytes_as(label, found)) for _, found in readable)) for label in labels],
        words=(0, 1),
    )
    intro = (
        "One row for each layer, one column for each class of weights; the first row is outside the decoder's layers."
    )
    return Section("schemes", "Scheme of every layer", intro, [legend] if labels else [], maps=maps)


def _bytes_as(label: str, contents: Contents) -> int:
    return sum(row.bytes for row in contents.rows if row.scheme == label)


def _cell(labels: Sequence[str], codes: dict[str, str]) -> Cell:
    color = scheme_color(labels[0]) if len(labels) == 1 else "other"
    return Cell("/".join(codes[label] for label in labels), color, ", ".join(labels))


def _unmeasured(
    sheets: Sequence[Sheet], what: str, verb: str = "evaluate", part: str = "quality"
) -> list[tuple[str, str]]:
    return [
        (f"{called(number, sheets)}: {what} not measured.", sheet.command(verb))
        for number, sheet in enumerate(sheets)
        if getattr(sheet, part) is None
    ]


def _quality(sheets: Sequence[Sheet], draw: bool) -> Section:
    found = [make(sheets, draw=draw) for make in (layers_chart, histogram_chart, positions_chart)]
    intro = (
        "KL says how far the predictions are from those of the source, in nats per token. The error by block is that of"
        " the hidden states relative to their size. Both on the same text, weights dequantized, without an engine."
    )
    absent = _unmeasured(sheets, "quality was")
    return Section("quality", "What was lost", intro, charts=[chart for chart in found if chart], absent=absent)


def _drafts(sheets: Sequence[Sheet], draw: bool) -> Section:
    found = acceptance_chart(sheets, draw=draw)
    reasons = [
        f"{called(number, sheets)}: no draft acceptance of the {side}: {clean(why)}"
        for number, sheet in enumerate(sheets)
        if sheet.quality is not None
        for side, why in sheet.quality.undrafted.items()
    ]
    lists = [("Not drafted", reasons)] if reasons else []
    absent = _unmeasured(sheets, "draft acceptance was")
    return Section("drafts", "Draft head", "", charts=[found] if found else [], lists=lists, absent=absent)


def _controls(sheets: Sequence[Sheet], draw: bool) -> Section:
    tables = [verdict_table(sheets), runs_table(sheets)]
    tables += [conditions_table(sheets, [(n, c.conditions) for n, c in controlled(sheets)], "Conditions of the runs")]
    charts = [
        control_chart(sheets[number], number, title=f"Runs of {called(number, sheets)}", draw=draw)
        for number, _ in controlled(sheets)
    ]
    intro = (
        "The same weights served in several ways: what differs between runs is the engine's doing, what all of them"
        " share is the checkpoint's. Every number holds for the machine and version below alone."
    )
    absent = _unmeasured(sheets, "nothing ran on an engine, control runs were", "validate", "controls")
    return Section(
        "controls", "Control runs", intro, [table for table in tables if table], [chart for chart in charts if chart],
        absent=absent,
    )  # fmt: skip


def _speed(sheets: Sequence[Sheet], draw: bool) -> Section:
    found = speed_chart(sheets, draw=draw)
    conditions = conditions_table(sheets, [(n, t.conditions) for n, t in timed(sheets)], "Conditions of the numbers")
    warned = [f"{called(n, sheets)}: {clean(text)}" for n, told in timed(sheets) for text in told.warnings]
    absent = _unmeasured(sheets, "throughput was", "bench", "throughput")
    return Section(
        "speed", "Throughput", "One stream and all streams together are different things, and never one number.",
        [conditions] if conditions else [], [found] if found else [],
        lists=[("What explains the numbers", warned)] if warned else [], absent=absent,
    )  # fmt: skip


def _notes(sheets: Sequence[Sheet]) -> Iterator[Section]:
    lists = []
    for number, sheet in enumerate(sheets):
        of_rows = () if sheet.quality is None else tuple(clean(note) for note in sheet.quality.notes)
        told = [*sheet.notes, *of_rows, *_strangers(sheet)]
        if told:
            lists.append((called(number, sheets), told))
    if lists:
        yield Section("notes", "Notes", "Of the plan and of the evaluation.", lists=lists)


def _strangers(sheet: Sheet) -> list[str]:
    names = () if sheet.contents is None else sheet.contents.unknown
    if not names:
        return []
    shown = ", ".join(clean(name) for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return [f"the family's layout does not know: {shown}{more}"]
