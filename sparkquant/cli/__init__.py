"""The command line: thin, and the only place that prints. Results go to stdout, progress and errors to stderr.

    shell.py      exit codes and streams       verbs.py     plan, quantize, verify
    tables.py     results as text              recipes.py   recipes ls/show/copy/lint/schema
    progress.py   events as a bar or lines     evaluation.py  evaluate and its tables
    calibration.py  calibration check           plans.py     plan --out and --explain
    reporting.py  report                        comparison.py  diff and its tables
    diagnosis.py  diagnose, doctor             validation.py  validate
    benchmarking.py  bench, bench compare

Nothing heavy is imported before a verb needs it: `sparkquant plan` never loads torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from sparkquant.cli import benchmarking, comparison, diagnosis, evaluation, reporting, validation, verbs
from sparkquant.cli.calibration import calibration
from sparkquant.cli.conversion import convert
from sparkquant.cli.publishing import publish
from sparkquant.cli.recipes import recipes
from sparkquant.cli.shell import Verbs, write

EXITS = """\b
Exit codes:
  0    done (warnings included)
  1    a bug of sparkquant, with a traceback
  2    usage, recipe or plan error
  3    the checkpoint cannot be read or is not supported
  4    a check failed
  5    a package or device is missing, or at fault
  6    stopped, and the same command goes on (disk full)
  7    inconclusive: something could not be measured
  130  interrupted; quantize goes on with the same command"""

app = typer.Typer(
    cls=Verbs,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXITS,
)
app.command(short_help="Show every tensor's fate, sizes and costs.")(verbs.plan)
app.command(short_help="Quantize a checkpoint into a new folder.")(verbs.quantize)
app.command(short_help="Check a quantized checkpoint.")(verbs.verify)
app.command(short_help="Measure what quantization lost.")(evaluation.evaluate)
app.command(short_help="Prove on vLLM which kernel ran, and that the output is right.")(validation.validate)
app.command(short_help="Measure throughput, and what explains it.")(benchmarking.bench)
app.command(short_help="Find out why a server prints garbage.")(diagnosis.diagnose)
app.command(short_help="Show what this machine will really run.")(diagnosis.doctor)
app.command(short_help="Show what is known of checkpoints.")(reporting.report)
app.command(short_help="Repair a checkpoint of another producer.")(convert)
app.command(short_help="Compare checkpoints, plans or recipes.")(comparison.diff)
app.command(short_help="Upload a checkpoint with card and evidence.")(publish)
app.add_typer(recipes)
app.add_typer(calibration)


def _version(wanted: bool) -> None:
    if wanted:
        from sparkquant import version

        write(f"sparkquant {version()}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Quantize hybrid language models by recipe, and prove that the result is right.

    \b
    Example:
      sparkquant plan Qwen3.5-27B -r qwen-hybrid-w4a16
      sparkquant quantize Qwen3.5-27B -r qwen-hybrid-w4a16 -o Qwen3.5-27B-W4A16
    """


def main() -> None:
    """The `sparkquant` command."""
    app(prog_name="sparkquant")
