"""`sparkquant validate`: the verb, and what it found as text."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkquant.cli.progress import progress
from sparkquant.cli.shell import clean, show, stop, write
from sparkquant.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sparkquant.marlin.validation import Validation

UNITS = {"s": 1, "m": 60, "h": 3600}

VllmOption = Annotated[
    str | None,
    typer.Option("--vllm", metavar="PATH", help="The `vllm` executable, a Python that has it, or a command."),
]
ArgumentOption = Annotated[
    list[str] | None,
    typer.Option("--vllm-arg", metavar="WORD", help="Add to the servers' command line (again for each word)."),
]
UrlOption = Annotated[str | None, typer.Option("--url", metavar="URL", help="A server that runs, instead of --vllm.")]
LogOption = Annotated[
    Path | None, typer.Option("--server-log", metavar="FILE", help="What the server at --url printed, whole.")
]


def validate(
    out: Annotated[str, typer.Argument(metavar="OUT", help="A quantized checkpoint, or a hub id.", show_default=False)],
    reference: Annotated[
        str | None, typer.Option("--reference", metavar="SRC", help="The checkpoint that it was made from, served too.")
    ] = None,
    reference_record: Annotated[
        Path | None, typer.Option("--reference-record", metavar="FILE", help="What --save-reference wrote, instead.")
    ] = None,
    vllm: VllmOption = None,
    url: UrlOption = None,
    server_log: LogOption = None,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel size.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="Candidate, reference, another kernel and drafts alone; shorter answers.")
    ] = False,
    soak: Annotated[
        str | None, typer.Option("--soak", metavar="DURATION", help="Keep the candidate under load: 90s, 30m, 2h.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DATA", help="What is asked, instead of the bundled conversations.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", metavar="N", help="Rows that are scored (32; quick: 8).")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", help="Of an answer (256; quick: 128).")
    ] = None,
    drafts: Annotated[int, typer.Option("--drafts", metavar="K", help="Tokens drafted per step.")] = 2,
    capability: Annotated[
        str | None, typer.Option("--capability", metavar="C", help="Of the chip, where this machine cannot tell.")
    ] = None,
    memory: Annotated[
        float, typer.Option("--memory", metavar="SHARE", help="Of the GPU's memory, for all servers.")
    ] = (0.85),
    parallel: Annotated[int, typer.Option("--parallel", metavar="N", help="Servers at once.")] = 1,
    start_limit: Annotated[str, typer.Option("--start-limit", metavar="DURATION", help="Of a server's start.")] = "30m",
    answer_limit: Annotated[str, typer.Option("--answer-limit", metavar="DURATION", help="Of one answer.")] = "10m",
    vllm_arg: ArgumentOption = None,
    logs: Annotated[
        Path | None, typer.Option("--logs", metavar="DIR", help="For the servers' logs (OUT.validate).")
    ] = None,
    save_reference: Annotated[
        Path | None, typer.Option("--save-reference", metavar="FILE", help="Keep what the reference showed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Serve a result with vLLM and prove which kernel ran and that its output is right.

    Every run is a fresh server with VLLM_MARLIN_USE_ATOMIC_ADD=1. Exit code 4
    for a fault of kernel, execution or checkpoint, 5 for one of the
    environment, 7 when something was not seen.

    \b
    Examples:
      sparkquant validate OUT --reference SRC --vllm /opt/vllm/bin/vllm
      sparkquant validate OUT --reference-record bf16.json.gz --soak 2h
      sparkquant validate OUT --url URL --server-log FILE --reference-record FILE
    """
    from sparkquant import evidence
    from sparkquant.marlin.validate import validate as run

    before = evidence.state_of(out) if Path(out).is_dir() else None
    with progress() as listener:
        found = run(
            out, reference=reference, reference_record=reference_record, vllm=vllm, url=url, server_log=server_log,
            tp=tp, quick=quick, soak_seconds=0.0 if soak is None else seconds_of(soak, "--soak"), data=data,
            rows=rows, max_tokens=max_tokens, drafts=drafts, capability=capability, memory=memory, parallel=parallel,
            start_limit=seconds_of(start_limit, "--start-limit"),
            answer_limit=seconds_of(answer_limit, "--answer-limit"), vllm_args=words_of(vllm_arg), logs=logs,
            save_reference=save_reference, listener=listener,
        )  # fmt: skip
        if before is not None and not evidence.unrecordable(out):
            inputs = {"reference": reference, "reference_record": reference_record, "quick": quick, "tp": tp}
            given = {key: value for key, value in inputs.items() if value is not None}
            evidence.record(out, "validate", found.as_json(), outcome=found.status, inputs=given, since=before)
    if as_json:
        write(json.dumps(found.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        show(validation_text(found))
    if found.verdict.exit_code:
        stop(found.verdict.exit_code)


def words_of(given: list[str] | None) -> tuple[str, ...]:
    """`--vllm-arg` as words: each may hold several, quoted like in a shell."""
    return tuple(word for text in given or () for word in ([text] if text.startswith("{") else shlex.split(text)))


def seconds_of(text: str, option: str) -> float:
    """`90s`, `30m`, `2h`, or plain seconds."""
    match = re.fullmatch(r"(\d{1,7}(?:\.\d{1,3})?)([smh]?)", text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r} is no duration", hint="write it like 90s, 30m or 2h")
    return float(match[1]) * UNITS[match[2] or "s"]


def validation_text(found: Validation) -> Iterator[RenderableType]:
    """What was run, the numbers, the notes, and last the verdict."""
    from rich.text import Text

    conditions = found.conditions
    chip = conditions["capability"] or "unknown"
    yield Text(f"vLLM {conditions['version']}, capability {chip}, tp {conditions['tp']}\n", "bold")
    yield Text(clean(found.preflight.atomic_add) + "\n")
    if found.seen:
        yield _runs(found)
        yield Text()
        yield from _capacity(found)
    for note in found.notes:
        yield Text(f"note: {clean(note)}")
    verdict = found.verdict
    for item in verdict.evidence:
        if item.points is not None:
            yield Text(f"{item.where}: {clean(item.what)}", "red" if not found.ok else "")
    yield Text(f"\n{verdict.outcome}: {clean(verdict.summary)}", "bold green" if found.ok else "bold red")
    yield Text(f"next: {clean(verdict.next)}")


def _runs(found: Validation) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    columns = ("run", "kernels", "start", "KL", "KL to reference", "NLL", "drafts", "tokens")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=number != 1)
    document = found.as_json()
    for role, run in document["runs"].items():
        kernels = ", ".join(dict.fromkeys(k["kernel"] for k in run["kernels"] if k["model"] == "main"))
        if run["failed"]:
            table.add_row(role, clean(run["failed"]))
            continue
        control, reference = document["to_controls"].get(role), document["to_reference"].get(role)
        answers: Mapping[str, Any] = next(iter(run["answers"].values()), {})
        table.add_row(
            role, clean(kernels), f"{run['start_seconds']:.0f} s",
            "" if control is None else f"{control['kl']:.5f}",
            "" if reference is None else f"{reference['kl']:.5f}",
            "" if reference is None else f"{reference['nll'][1]:.4f}",
            _drafts(run["acceptance"]),
            "" if answers.get("mean_tokens") is None else f"{answers['mean_tokens']:.0f}",
        )  # fmt: skip
    return table


def _drafts(acceptance: Mapping[str, Any] | None) -> str:
    if acceptance is None or not acceptance["rates"]:
        return ""
    return " ".join(f"{rate:.0%}" for rate in acceptance["rates"])


def _capacity(found: Validation) -> Iterator[RenderableType]:
    """Memory as the start-up logs tell it: it does not follow the size of the files."""
    from rich.text import Text

    for role, run in found.seen.items():
        log = run.log
        if log is not None and log.kv_cache_tokens and str(role) in ("candidate", "reference"):
            most = (
                "" if log.max_concurrency is None else f", {log.max_concurrency:.1f} requests of {log.max_model_len:,}"
            )
            ranks = "" if (log.tensor_parallel or 1) == 1 else " on a rank"
            yield Text(f"{role}: weights {log.load_gib} GiB{ranks}, KV cache {log.kv_cache_tokens:,} tokens{most}")
