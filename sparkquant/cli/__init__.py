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

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sparkquant.cli.shell import Verbs, write

VERBS = {
    "plan": ("verbs", "Show every tensor's fate, sizes and costs."),
    "quantize": ("verbs", "Quantize a checkpoint into a new folder."),
    "verify": ("verbs", "Check a quantized checkpoint."),
    "evaluate": ("evaluation", "Measure what quantization lost."),
    "validate": ("validation", "Prove on vLLM which kernel ran, and that the output is right."),
    "bench": ("benchmarking", "Measure throughput, and what explains it."),
    "diagnose": ("diagnosis", "Find out why a server prints garbage."),
    "doctor": ("diagnosis", "Show what this machine will really run."),
    "report": ("reporting", "Show what is known of checkpoints."),
    "convert": ("conversion", "Repair a checkpoint of another producer."),
    "diff": ("comparison", "Compare checkpoints, plans or recipes."),
    "publish": ("publishing", "Upload a checkpoint with card and evidence."),
    "recipes": ("recipes", ""),
    "calibration": ("calibration", ""),
}
"""The module of each verb, and its line in the list of verbs; groups of verbs say theirs themselves."""

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


class AllVerbs(Verbs):
    """The verbs, each imported when it is asked for: `plan` must not pay for the others."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name in VERBS:
            self.add_command(TyperCommand(name))  # its name alone: for lists and for "did you mean"

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 (the signature of the base class)
        """The verb of that name, or None."""
        if cmd_name not in VERBS:
            return None
        module, line = VERBS[cmd_name]
        verb = getattr(import_module(f"sparkquant.cli.{module}"), cmd_name)
        if isinstance(verb, typer.Typer):
            return typer.main.get_group(verb)
        alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        alone.command(cmd_name, short_help=line)(verb)
        return typer.main.get_command(alone)


app = typer.Typer(
    cls=AllVerbs,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXITS,
)


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
