"""`sparkquant diagnose` and `sparkquant doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from sparkquant.cli.progress import progress
from sparkquant.cli.shell import show, stop, write_json
from sparkquant.cli.verbs import JsonOption


def diagnose(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A checkpoint folder or a hub id: it is verified too.")
    ] = None,
    server_log: Annotated[
        str | None, typer.Option("--server-log", metavar="FILE", help="All that the server printed.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="A running server: it is asked a few greedy prompts.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option("--answer", metavar="FILE", help="Text that the server generated.")
    ] = None,
    capability: Annotated[
        str | None, typer.Option("--capability", metavar="C", help="The server's chip, which logs do not say.")
    ] = None,
    vllm: Annotated[
        str | None, typer.Option("--vllm", metavar="PATH", help="The server's vLLM: its compiled code is read.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find out why a server prints garbage or crashes: kernel, execution, checkpoint or environment.

    A log alone is enough, on any machine. Whether the kernel that was asked
    for is the one that ran comes from the log; whether the checkpoint is
    sound from MODEL; whether answers are broken from --url or --answer.

    \b
    Examples:
      sparkquant diagnose --server-log vllm.log
      sparkquant diagnose OUT --url URL --server-log FILE --capability 12.1
    """
    from sparkquant.marlin.diagnosis import diagnose as look

    with progress() as listener:
        found = look(
            model, url=url, server_log=server_log, answer=answer, capability=capability, vllm=vllm, listener=listener
        )
    if as_json:
        write_json(json.dumps(found.as_json(), indent=1, ensure_ascii=False) + "\n")
    else:
        from sparkquant.cli.diagnosis_text import diagnosis_text, next_text

        show(diagnosis_text(found))
        show([next_text(found.verdict)], soft_wrap=True)
    if found.verdict.exit_code:
        stop(found.verdict.exit_code)


def doctor(
    vllm: Annotated[
        str | None,
        typer.Option(
            "--vllm", metavar="PATH", help="A python interpreter, `vllm` script, virtual environment or package folder."
        ),
    ] = None,
    capability: Annotated[
        str | None, typer.Option("--capability", metavar="C", help="Judge for this chip instead: 12.1 is GB10.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine and its vLLM build will really run, and known faults of the pair.

    Works without a GPU; vLLM is read, not imported.

    \b
    Examples:
      sparkquant doctor
      sparkquant doctor --vllm ~/vllm-env --capability 12.1
    """
    from sparkquant.marlin.doctor import examine

    found = examine(vllm, capability)
    if as_json:
        write_json(json.dumps(found.as_json(), indent=1, ensure_ascii=False) + "\n")
    else:
        from sparkquant.cli.diagnosis_text import examination_text

        show(examination_text(found))
    if found.exit_code:
        stop(found.exit_code)
