"""`sparkquant calibration check`: look at calibration rows before hours are spent on them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from sparkquant.cli.shell import Verbs, clean, stop, write, write_json

if TYPE_CHECKING:
    from sparkquant.calibration import CalibrationCheck

REFUSED = 2
BAR = 40

HELP = """Look at calibration data.

\b
Example:
  sparkquant calibration check coding-agent --model Qwen3.5-27B
"""
calibration = typer.Typer(cls=Verbs, name="calibration", help=HELP, no_args_is_help=True, rich_markup_mode=None)

AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="WHAT",
        help="Lift a refusal: few-tokens, no-thinking, truncated, empty-source, null-content. Repeatable.",
    ),
]


@calibration.command("check")
def check(
    mix: Annotated[
        str,
        typer.Argument(
            metavar="MIX", help="A shipped mix, a mix file, conversations or rows of ids.", show_default=False
        ),
    ],
    model: Annotated[str, typer.Option("--model", metavar="SRC", help="The checkpoint whose template renders them.")],
    rows: Annotated[int | None, typer.Option("--rows", help="How many rows, instead of the mix's own number.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Longest row in tokens.")] = None,
    show: Annotated[int, typer.Option("--show", metavar="N", help="Print N rows as the model reads them.")] = 0,
    allow: AllowOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Count, measure and render calibration rows; exit 2 when quantize would refuse them.

    \b
    Examples:
      sparkquant calibration check coding-agent --model Qwen3.5-27B --show 3
      sparkquant calibration check own-logs.yaml --model Qwen3.5-27B --json
    """
    from sparkquant.calibration import check_calibration

    found = check_calibration(mix, model, rows=rows, tokens=tokens, allow=tuple(allow or ()), show=show)
    if as_json:
        write_json(json.dumps(found.as_json(), indent=1, ensure_ascii=False) + "\n")
    else:
        write(_text(found))
    if not found.ok:
        stop(REFUSED)


def _text(found: CalibrationCheck) -> str:
    """Counts, histogram, findings, dropped items and samples."""
    made = found.calibration
    lengths = sorted(len(row) for row in made.rows)
    lines = [f"{len(lengths)} rows, {sum(lengths):,} tokens"]
    if lengths:
        lines.append(f"lengths {lengths[0]} to {lengths[-1]}, half of them at most {lengths[len(lengths) // 2]}")
    per_source: dict[str, list[int]] = {}
    for source, row in zip(made.sources, made.rows, strict=True):
        per_source.setdefault(source, []).append(len(row))
    width = max((len(name) for name in per_source), default=0)
    for name, sizes in sorted(per_source.items()):
        lines.append(f"  {clean(name):<{width}}  {len(sizes):>5} rows  {sum(sizes):>9,} tokens")
    lines += _histogram(lengths)
    for item in found.checks:
        lines.append(f"{item.status!s:<8} {item.id:<24} {clean(item.message)}")
    for problem in found.problems[:20]:
        lines.append(f"dropped  {clean(problem)}")
    if len(found.problems) > 20:
        lines.append(f"dropped  and {len(found.problems) - 20} more (--json lists all)")
    for sample in found.samples:
        lines += [
            "",
            f"--- {clean(sample.source)}, {sample.tokens} tokens",
            *(clean(line.replace("\t", "    ")) for line in sample.text.split("\n")),
        ]
    return "\n".join(lines) + "\n"


def _histogram(lengths: list[int]) -> list[str]:
    """Rows by length, in doubling bins."""
    bins: dict[int, int] = {}
    for length in lengths:
        bins[max(0, length - 1).bit_length()] = bins.get(max(0, length - 1).bit_length(), 0) + 1
    most = max(bins.values(), default=1)
    return [
        f"  up to {2**power:>7,} tokens  {count:>5}  {'#' * max(1, round(BAR * count / most))}"
        for power, count in sorted(bins.items())
    ]
