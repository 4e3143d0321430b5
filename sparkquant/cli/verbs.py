"""The verbs: each one calls a function of the library and shows what it returned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sparkquant.cli.calibration import AllowOption
from sparkquant.cli.plans import explained, refuse_target, write_file
from sparkquant.cli.progress import progress
from sparkquant.cli.recording import NoEvidenceOption, Recording
from sparkquant.cli.shell import clean, parse_bytes, parse_ranks, show, stop, write, write_json
from sparkquant.errors import UsageError

CHECK_FAILED = 4

Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint folder or a hub id.", show_default=False)]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        metavar="RECIPE",
        help="A shipped recipe or a YAML file; by default the sparkquant.yaml or recipe.yaml of the model's"
        " repository, or else qwen-hybrid-w4a16.",
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="METHOD",
        help="rtn, mse, imatrix, gptq, autoround, modelopt, llmcompressor; or {name: ..., option: ...}.",
    ),
]
RanksOption = Annotated[
    str, typer.Option("--tp", metavar="1,2", help="Refuse what cannot be served with these tensor-parallel sizes.")
]
ShardOption = Annotated[
    str, typer.Option("--max-shard-size", metavar="SIZE", help="Upper size of a file of the result.")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine", metavar="vllm==X", help="Refuse what this vLLM version cannot load, and show its kernels."
    ),
]
CapabilityOption = Annotated[
    str | None,
    typer.Option("--capability", metavar="C", help="Compute capability that must have kernels: 12.1 is GB10."),
]
RequantizeOption = Annotated[
    bool,
    typer.Option("--allow-requantize", help="Let weights that are quantized in the source go below 8 bits."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def plan(
    source: Source,
    recipe: RecipeOption = None,
    method: MethodOption = None,
    tp: RanksOption = "",
    engine: EngineOption = None,
    capability: CapabilityOption = None,
    allow_requantize: RequantizeOption = False,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="NAME", help="Show how one tensor was decided, nothing else.")
    ] = None,
    as_json: JsonOption = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also write the plan as JSON, for `sparkquant diff`.")
    ] = None,
    max_shard_size: ShardOption = "5GB",
) -> None:
    """Show every tensor's fate, the sizes and the costs, from headers alone.

    \b
    Examples:
      sparkquant plan Qwen3.5-27B -r qwen-hybrid-w4a16
      sparkquant plan Qwen3.5-27B -r qwen-hybrid-w4a16 --tp 1,2 --json
      sparkquant plan Qwen3.5-27B --engine vllm==0.25.1
      sparkquant plan Qwen3.5-27B --explain lm_head
    """
    from sparkquant.planning import plan as make

    if explain is not None and as_json:
        raise UsageError("--explain is text, --json is the whole plan", hint="pass one of them")
    ranks = parse_ranks(tp)
    if out is not None:
        refuse_target(out, source)
    made = make(
        source,
        recipe,
        method=method,
        tp=ranks,
        shard_bytes=parse_bytes(max_shard_size),
        engine=engine,
        capability=capability,
        allow_requantize=allow_requantize,
    )
    from sparkquant.routing import engine_routes, kernel_rows

    if out is not None or as_json:
        document = made.to_json(kernels=kernel_rows(made, engine, ranks, capability))
    if out is not None:
        write_file(out, document)
    if explain is not None:
        write(explained(made, explain))
    elif as_json:
        write_json(document)
    else:
        from sparkquant.cli.tables import plan_text

        sizes = ranks or tuple(made.recipe.target.tensor_parallel)
        routes = engine_routes(made, engine, sizes, capability) if made.layout.engines else None
        show(plan_text(made, source, written=out, routes=routes))


def quantize(
    source: Source,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="OUT", help="The new folder; an existing one is never touched.")
    ],
    recipe: RecipeOption = None,
    method: MethodOption = None,
    tp: RanksOption = "",
    engine: EngineOption = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard what an interrupted run left in OUT.partial.")
    ] = False,
    max_shard_size: ShardOption = "5GB",
    calibration: Annotated[
        str | None,
        typer.Option(
            "--calibration", metavar="DATA", help="A mix, conversations or rows of ids, instead of the recipe's mix."
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", metavar="N", min=1, help="At most N calibration rows, for a quick run.")
    ] = None,
    allow: AllowOption = None,
    allow_requantize: RequantizeOption = False,
    device: Annotated[str, typer.Option("--device", help="Where calibrated methods run: auto, cpu, cuda.")] = "auto",
    max_memory: Annotated[
        str | None,
        typer.Option("--max-memory", metavar="SIZE", help="What calibration may use, instead of what is free."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Quantize a checkpoint into a new folder, and verify it before it appears.

    An interrupted run goes on when the same command is given again.

    \b
    Examples:
      sparkquant quantize Qwen3.5-27B -r qwen-hybrid-w4a16 -o Qwen3.5-27B-W4A16
      sparkquant quantize LFM2-8B-A1B -r lfm2-w4a16-conv -o OUT --engine 0.33
      sparkquant quantize Qwen3.5-27B -o OUT --calibration my-logs.jsonl
      sparkquant quantize Qwen3.5-27B -r qwen-hybrid-w4a16 -o OUT --method mse
    """
    from sparkquant.execute import quantize as run

    ranks, shard_bytes = parse_ranks(tp), parse_bytes(max_shard_size)
    with progress() as listener:
        made = run(
            source,
            recipe,
            out,
            method=method,
            tp=ranks,
            engine=engine,
            shard_bytes=shard_bytes,
            restart=restart,
            calibration=calibration,
            rows=rows,
            allow=tuple(allow or ()),
            allow_requantize=allow_requantize,
            device=device,
            max_memory=None if max_memory is None else parse_bytes(max_memory),
            listener=listener,
        )
    totals = made.plan.totals
    if as_json:
        fields = {"out": str(made.out), "plan": made.plan.digest, "totals": totals, "checks": made.report.as_json()}
        write_json(json.dumps(fields, indent=1, ensure_ascii=False) + "\n")
        return
    from sparkquant.checkpoint import read_json
    from sparkquant.cli.tables import shell_word, shown_path, size, verdict, warnings
    from sparkquant.serve_command import serve_command

    where = shown_path(made.out)
    write(f"{clean(where)}: {size(totals['output_bytes'])}, {totals['bits_per_weight']} bits per weight\n")
    write(f"verified before it was put in place: {verdict(made.report)}\n")
    write("".join(f"{line}\n" for line in warnings(made.report)))
    write(f"next: {serve_command(shell_word(where), read_json(made.out / 'config.json'), totals)}\n")


def verify(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A checkpoint folder of any producer.", show_default=False)
    ],
    source: Annotated[
        str | None, typer.Option("--source", metavar="SRC", help="The checkpoint that it was made from.")
    ] = None,
    headers: Annotated[
        bool, typer.Option("--headers", help="Names, shapes, config and index only: no tensor is read.")
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Every stored value as well as every scale.")] = False,
    engine: EngineOption = None,
    tp: Annotated[
        str, typer.Option("--tp", metavar="1,2", help="Tensor-parallel sizes that every module must have a kernel for.")
    ] = "",
    capability: CapabilityOption = None,
    every: Annotated[bool, typer.Option("--all", help="Say of every check what it proves, passed or not.")] = False,
    no_evidence: NoEvidenceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a quantized checkpoint: nothing missing, nothing extra, scales sound, config read as meant.

    Exit code 4 when a check fails, 3 when the folder cannot be read.

    \b
    Examples:
      sparkquant verify Qwen3.5-27B-W4A16 --source Qwen3.5-27B
      sparkquant verify OUT --engine vllm==0.25.1 --tp 1,2 --capability 12.1
      sparkquant verify Qwen3.5-27B-W4A16 --headers --json
    """
    from sparkquant.verification.gate import verify as check

    if headers and deep:
        raise UsageError("--headers reads no tensor, --deep reads all of them", hint="pass one of them")
    ranks = parse_ranks(tp)
    level = "headers" if headers else "deep" if deep else "default"
    # A check of headers takes no time; the digest that evidence is bound to reads every file.
    recording = Recording(out, "verify", wanted=not (no_evidence or headers))
    with progress() as listener:
        report = check(
            out, source=source, level=level, engine=engine, tp=ranks or (1,), capability=capability, listener=listener
        )
    inputs = {"source": source, "level": level, "engine": engine, "tp": list(ranks or (1,)), "capability": capability}
    recording.keep({"ok": report.ok, "checks": report.as_json()}, inputs)
    if as_json:
        write_json(report.to_json())
    else:
        from sparkquant.cli.tables import report_text

        show(report_text(report, every=every, routes=bool(engine or ranks or capability)))
    if not report.ok:
        stop(CHECK_FAILED)
