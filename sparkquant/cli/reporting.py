"""`sparkquant report`: a page, Markdown or JSON about one checkpoint or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparkquant.cli.plans import write_file
from sparkquant.cli.progress import progress
from sparkquant.cli.shell import clean, write, write_json
from sparkquant.errors import UsageError

PAGE = "report.html"
SUFFIXES = {".html": "html", ".htm": "html", ".md": "md", ".json": "json"}


def report(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="OUT...", help="Quantized checkpoints; several are compared.", show_default=False),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help=f"Where to write; - is stdout. A page goes to {PAGE} by default."
        ),
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", metavar="html|md|json", help="By default as FILE ends, else html.")
    ] = None,
) -> None:
    """Show what a checkpoint holds, what was checked, and what quantization cost.

    One page without scripts that needs no network. Numbers come from the
    records that verify, evaluate, validate and bench left in the checkpoint;
    what was not measured is named, with the command that measures it.

    \b
    Examples:
      sparkquant report Qwen3.5-27B-W4A16
      sparkquant report Qwen3.5-27B-W4A16 Qwen3.5-27B-NVFP4 -o compared.html
      sparkquant report Qwen3.5-27B-W4A16 --format md
    """
    from sparkquant.reporting import report_on

    form = form or SUFFIXES.get(Path(out or "").suffix.lower(), "html")
    out = out or (PAGE if form == "html" else "-")
    if out != "-":
        _refuse_target(Path(out), folders)
    with progress() as listener:
        text = report_on(folders, form=form, listener=listener)
    if out != "-":
        write_file(Path(out), text)
        write(f"{clean(out)}: {len(text.encode()):,} bytes\n")
    elif form == "json":
        write_json(text)
    else:
        write(text)


def _refuse_target(out: Path, folders: list[str]) -> None:
    """Refuse what a report must not replace: anything but a report, and anything inside a checkpoint."""
    for folder in map(Path, folders):
        if folder.is_dir() and folder.resolve() in out.resolve().parents:
            why = "a file more would make its evidence stale"
            raise UsageError(f"{out} lies inside a checkpoint: {why}", hint="choose a file beside it")
    if not (out.is_symlink() or out.exists()):
        return
    try:
        ours = out.is_file() and not out.is_symlink() and b"sparkquant" in out.read_bytes()[:2000]
    except OSError:
        ours = False
    if not ours:
        hint = "choose another name, or remove it yourself; only a report is replaced"
        raise UsageError(f"{out} exists already, and is no report", hint=hint)
