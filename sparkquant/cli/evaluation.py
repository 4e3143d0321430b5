"""`sparkquant evaluate`: the verb, and its numbers as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparkquant.cli.progress import progress
from sparkquant.cli.recording import NoEvidenceOption, Recording
from sparkquant.cli.shell import clean, show, stop, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from sparkquant.evaluation import Evaluation

CHECK_FAILED, INCONCLUSIVE = 4, 7


def evaluate(
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="A quantized checkpoint of any producer.", show_default=False)
    ],
    source: Annotated[
        str, typer.Option("--source", metavar="SRC", help="The checkpoint that it was made from.", show_default=False)
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="Conversations (.jsonl), token ids (.json) or a calibration mix, instead of the bundled texts.",
        ),
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option("--tasks", metavar="FILE", help="Recall tasks (.jsonl) instead of the bundled ones.")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", metavar="N", help="At most N rows and N tasks.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", metavar="N", help="Cut rows to N tokens.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu or cuda.")] = "auto",
    no_evidence: NoEvidenceOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Measure what quantization lost: KL, exact recall, draft acceptance.

    Both checkpoints run side by side, block by block, without an engine. Exit
    code 4 when a limit of the recipe is violated or the result computes NaN,
    7 when a limit could not be measured.

    \b
    Examples:
      sparkquant evaluate Qwen3.5-27B-W4A16 --source Qwen3.5-27B
      sparkquant evaluate Qwen3.5-27B-W4A16 --source Qwen3.5-27B --rows 8 --json
    """
    from sparkquant.evaluation import evaluate as measure
    from sparkquant.report import Status

    recording = Recording(out, "evaluate", wanted=not no_evidence)
    with progress() as listener:
        found = measure(
            out, source=source, data=data, tasks=tasks, rows=rows, tokens=tokens, device=device, listener=listener
        )
    inputs = {"source": source, "data": data, "tasks": tasks, "rows": rows, "tokens": tokens, "device": device}
    recording.keep(found.as_json(), inputs)
    if as_json:
        document = {"out": out, "source": source, **found.as_json()}
        write_json(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        show(evaluation_text(found, out))
    states = {check.status for check in found.checks}
    if Status.FAIL in states:
        stop(CHECK_FAILED)
    if Status.INCONCLUSIVE in states:
        stop(INCONCLUSIVE)


def evaluation_text(found: Evaluation, out: str) -> Iterator[RenderableType]:
    """Every number, the worst blocks, the notes, and last the recipe's limits."""
    from rich.text import Text

    from sparkquant.cli.tables import report_text
    from sparkquant.report import Report

    yield Text(f"{found.rows} rows, {found.tokens:,} tokens, {found.recall['tasks']} recall tasks\n", "bold")
    yield _numbers(found)
    yield Text()
    if found.acceptance:
        yield _drafting(found)
    for side, why in found.undrafted.items():
        yield Text(f"no draft acceptance of the {side}: {clean(why)}", "yellow")
    yield Text("\nBlocks that added most to the relative error of the hidden states", "bold")
    yield _blocks(found)
    for note in found.notes:
        yield Text(f"note: {clean(note)}")
    yield Text()
    if found.checks:
        yield from report_text(Report.of(out, found.checks), every=True)
    else:
        yield Text("no recipe in the result: no limits to hold these numbers against")


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _numbers(found: Evaluation) -> Table:
    table = _table("", "source", "result", "difference")
    before, after = found.nll["source"], found.nll["result"]
    error = "" if found.kl_se is None else f" ± {found.kl_se:.5f}"
    table.add_row("KL mean, nats per token", "", "", f"{found.kl_mean:.5f}{error}")
    table.add_row("KL 99th percentile", "", "", f"{found.kl_p99:.4f}")
    table.add_row("same most likely token", "", "", f"{found.top1:.2%}")
    table.add_row("NLL, nats per token", f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}")
    exact = found.recall["source"], found.recall["result"]
    table.add_row(
        "exact recall", str(exact[0]), str(exact[1]), f"{exact[1] - exact[0]:+d} ({found.recall['lost']} lost)"
    )
    return table


def _drafting(found: Evaluation) -> Table:
    positions = max(len(rates) for sides in found.acceptance.values() for rates in sides.values())
    table = _table("drafts accepted up to position", *map(str, range(1, positions + 1)), "drafts")
    for name, sides in found.acceptance.items():
        for side, rates in sides.items():
            table.add_row(f"{name}, {side}", *(f"{rate:.1%}" for rate in rates), f"{found.drafts[name]:,}")
    return table


def _blocks(found: Evaluation) -> Table:
    table = _table("block", "added", "behind it")
    for index, added in found.worst_layers():
        table.add_row(str(index), f"{added:+.4f}", f"{found.layers[index]:.4f}")
    return table
