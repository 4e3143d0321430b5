"""`sparkquant bench` and `sparkquant bench compare`: the verbs, and their numbers as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkquant.cli.progress import progress
from sparkquant.cli.shell import clean, show, write
from sparkquant.cli.validation import ArgumentOption, LogOption, UrlOption, VllmOption, seconds_of, words_of
from sparkquant.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from sparkquant.marlin.bench_compare import Comparison
    from sparkquant.marlin.bench_record import BenchRecord, Measured


def bench(
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="OUT | compare A B", help="A checkpoint or a hub id; or two records.", show_default=False
        ),
    ],
    vllm: VllmOption = None,
    url: UrlOption = None,
    server_log: LogOption = None,
    drafts: Annotated[
        int, typer.Option("--drafts", metavar="K", help="Speculate with the checkpoint's draft head, K tokens a step.")
    ] = 0,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", help="Measured rounds, at least 3.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Of an answer.")] = 256,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel size.")] = 1,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DATA", help="What is asked, instead of the bundled conversations.")
    ] = None,
    engine_choice: Annotated[
        bool, typer.Option("--engine-choice", help="Leave the kernels to the engine instead of asking for Marlin.")
    ] = False,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the model think before it answers.")] = False,
    memory: Annotated[float, typer.Option("--memory", metavar="SHARE", help="Of the GPU's memory.")] = 0.85,
    capability: Annotated[
        str | None, typer.Option("--capability", metavar="C", help="Of the chip, where this machine cannot tell.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", metavar="TEXT", help="What the server at --url runs on.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Variables of the server at --url; `none` for none."),
    ] = None,
    start_limit: Annotated[
        str, typer.Option("--start-limit", metavar="DURATION", help="Of the server's start.")
    ] = "30m",
    vllm_arg: ArgumentOption = None,
    log: Annotated[Path | None, typer.Option("--log", metavar="FILE", help="For the server's output.")] = None,
    record: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the record as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Measure throughput with everything that explains it, or compare two records.

    One stream and all streams are kept apart, and so are edits and fresh
    text. A record that lacks a condition is not written.

    \b
    Examples:
      sparkquant bench OUT --vllm /opt/vllm/bin/vllm --drafts 2 --out mtp.json
      sparkquant bench OUT --url URL --server-log FILE --hardware GB10 --env none
      sparkquant bench compare plain.json mtp.json
    """
    if target[0] == "compare":
        _compare(target[1:], as_json)
        return
    if len(target) > 1:
        raise UsageError(f"{len(target)} checkpoints at once", hint="pass one, or `compare A B` for two records")
    from sparkquant import evidence
    from sparkquant.marlin.bench import bench as run
    from sparkquant.marlin.places import writable_file

    out = target[0]
    before = evidence.state_of(out) if Path(out).is_dir() else None
    if record is not None:
        writable_file(record)
    with progress() as listener:
        found = run(
            out, vllm=vllm, url=url, server_log=server_log, drafts=drafts, rounds=rounds, max_tokens=max_tokens, tp=tp,
            data=data, engine_choice=engine_choice, thinking=thinking, memory=memory, capability=capability,
            hardware=hardware, environment=_environment(env), start_limit=seconds_of(start_limit, "--start-limit"),
            vllm_args=words_of(vllm_arg), log=log, listener=listener,
        )  # fmt: skip
        if before is not None and not evidence.unrecordable(out):
            evidence.record(out, "bench", found.as_json(), inputs={"tp": tp, "drafts": drafts}, since=before)
    text = json.dumps(found.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if record is not None:
        record.write_text(text, encoding="utf-8")
    if as_json:
        write(text)
    else:
        show(record_text(found))


def _environment(given: list[str] | None) -> dict[str, str] | None:
    if given is None:
        return None
    if given == ["none"]:
        return {}
    wrong = [text for text in given if "=" not in text]
    if wrong:
        raise UsageError(f"--env {wrong[0]!r} is no NAME=VALUE", hint="write it like VLLM_MARLIN_USE_ATOMIC_ADD=1")
    return {name: value for name, _, value in (text.partition("=") for text in given)}


def _compare(paths: list[str], as_json: bool) -> None:
    from sparkquant.marlin.bench_compare import compare
    from sparkquant.marlin.bench_record import load_record

    if len(paths) != 2:
        raise UsageError("`bench compare` takes two records", hint="sparkquant bench compare A.json B.json")
    found = compare(*(load_record(path) for path in paths))
    if as_json:
        write(json.dumps(found.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n")
    else:
        show(comparison_text(found))


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def record_text(found: BenchRecord) -> Iterator[RenderableType]:
    """Numbers with their rounds, conditions, warnings."""
    from rich.text import Text

    table = _table("", "median", "rounds")
    for kind, measured in found.decode.items():
        table.add_row(f"one stream, {kind}, tok/s", *_numbers(measured, 1))
    for width, measured in found.aggregate.items():
        table.add_row(f"all of {width} together, tok/s", *_numbers(measured, 1))
    table.add_row("prefill, tok/s", *_numbers(found.prefill, 0))
    table.add_row("first token, ms", f"{1000 * found.first_token.median:.1f}", "")
    for kind, accepted in found.acceptance.items():
        rates = " ".join(f"{rate:.1%}" for rate in accepted.rates)
        table.add_row(f"drafts accepted, {kind}", rates, f"{accepted.drafts:,} drafts")
    yield Text(
        f"{clean(found.model)}, vLLM {found.versions['vllm']}, {clean(found.hardware)} ({found.capability})\n", "bold"
    )
    yield table
    yield Text()
    yield Text(_conditions(found))
    for warning in found.warnings():
        yield Text(f"warning: {clean(warning)}", "yellow")


def _conditions(found: BenchRecord) -> str:
    draft = "no speculation" if not found.speculation.k else f"{found.speculation.method}, k={found.speculation.k}"
    think = "thinking" if found.thinking else "no thinking"
    variables = " ".join(f"{name}={value}" for name, value in found.environment.items()) or "no variables"
    return (
        f"prompts of {found.lengths.prompt:.0f} tokens, all distinct, answers of {found.lengths.output:.0f}; prefix"
        f" cache {found.cache.state}; {draft}; {think}; KV cache {found.kv_cache_tokens:,} tokens; {clean(variables)}"
    )


def _numbers(measured: Measured, digits: int) -> tuple[str, str]:
    return f"{measured.median:,.{digits}f}", " ".join(f"{value:,.{digits}f}" for value in measured.rounds)


def comparison_text(found: Comparison) -> Iterator[RenderableType]:
    """Ratios, what differs, and what explains them."""
    from rich.text import Text

    table = _table("", "A", "B", "B / A", "")
    for row in found.rows:
        table.add_row(
            row.name,
            f"{row.a:,.3g}",
            f"{row.b:,.3g}",
            f"{row.ratio:.3f}",
            "" if row.beyond_noise else "within the noise",
        )
    yield table
    yield Text()
    for name, (a, b) in found.differing.items():
        yield Text(f"{name}: {_short(a)} and {_short(b)}")
    for warning in found.warnings:
        yield Text(f"warning: {clean(warning)}", "yellow")


def _short(value: Any) -> str:
    text = clean(json.dumps(value, ensure_ascii=False))
    return text if len(text) < 100 else text[:97] + "..."
