"""`sparkquant convert`: a finished checkpoint of another producer, re-emitted and repaired."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sparkquant.cli.progress import progress
from sparkquant.cli.shell import clean, write, write_json


def convert(
    checkpoint: Annotated[
        str, typer.Argument(metavar="SRC", help="A quantized checkpoint of any producer.", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="OUT", help="The new folder; an existing one is never touched.")
    ],
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="BF16", help="The 16-bit checkpoint that it was made from."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard what an interrupted run left in OUT.partial.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Re-emit a finished checkpoint as compressed-tensors, repaired without changing a number.

    Reads what AutoRound, GPTQ, AWQ, ModelOpt, FP8 and compressed-tensors
    producers write. With --source, a lost draft head, vision tower or side
    file is taken from there. Every change is listed; what would round
    anything again is refused.

    \b
    Examples:
      sparkquant convert Qwen3.5-27B-AutoRound -o OUT --source Qwen3.5-27B
      sparkquant convert Qwen3.5-27B-NVFP4 -o OUT --json
    """
    from sparkquant.conversion import convert as run

    with progress() as listener:
        made = run(checkpoint, out, source=source, restart=restart, listener=listener)
    if as_json:
        write_json(json.dumps(made.as_json(), indent=1, ensure_ascii=False) + "\n")
        return
    from sparkquant.cli.tables import shown_path, verdict, warnings

    write("".join(f"{clean(change)}\n" for change in made.changes or ("nothing had to be changed",)))
    write("".join(f"{line}\n" for line in warnings(made.report)))
    write(f"{clean(shown_path(made.out))}: {verdict(made.report)}\n")
