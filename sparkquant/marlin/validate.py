"""`sparkquant.validate`: prove on a running engine which kernel ran, and that the output is right.

found = sparkquant.validate("Qwen3.5-27B-W4A16", reference="Qwen3.5-27B", vllm="/opt/vllm/bin/vllm")
found.verdict.outcome, found.verdict.next
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkquant import events
from sparkquant.checkpoint import Checkpoint
from sparkquant.engine.versions import engine_named, require_capability
from sparkquant.errors import UsageError
from sparkquant.evaluation_data import Data
from sparkquant.marlin.client import TIME_LIMIT, Client
from sparkquant.marlin.comparing import Comparisons, compare, lengths_of
from sparkquant.marlin.controls import CONCURRENCY, QUICK, Bench, Observation, Role, questions, tasks_of
from sparkquant.marlin.decision import Case, decide, look_closer
from sparkquant.marlin.dialect import ATOMIC_ADD, DIALECTS, Settings
from sparkquant.marlin.fleet import Asked, run_all
from sparkquant.marlin.log import read_log_file
from sparkquant.marlin.machine import look
from sparkquant.marlin.places import place_beside, writable_file, writable_folder
from sparkquant.marlin.preflight import Preflight, has_draft_head, preflight
from sparkquant.marlin.prompts import Prompts, counts, prompts_of
from sparkquant.marlin.reference import load_reference, save_reference
from sparkquant.marlin.server import START_LIMIT, Server, command_of, require_own_words, require_share, version_of
from sparkquant.marlin.server_log import ServerLog
from sparkquant.marlin.soak import Load, after_soak, soak
from sparkquant.marlin.thresholds import Thresholds, thresholds_of
from sparkquant.marlin.validation import Validation, conditions_of
from sparkquant.marlin.verdict import Evidence, Outcome, Verdict
from sparkquant.source import folder_of

MAX_MODEL_LEN, MAX_TOKENS, QUICK_TOKENS = 2048, 256, 128
ROWS, QUICK_ROWS = 32, 8
ASKS = 16
DRAFTS = 2
MEMORY = 0.85
"""Of the GPU's; on a GB10 that is the whole machine's, and more is reported to end it."""


@dataclass(frozen=True, slots=True)
class Options:
    """Everything about a run that has a default.

    tp            tensor-parallel size
    quick         candidate, reference, another kernel and drafts alone, on fewer and shorter answers
    data          what is asked: conversations, rows of token ids or a mix; the bundled conversations by default
    soak_seconds  keep the candidate under load for so long
    logs          folder for the servers' logs; `OUT.validate` by default
    vllm_args     words that are added to every server's command line, last, so that they win
    capability    of the chip, where this machine cannot tell or the server runs elsewhere
    memory        share of the GPU's memory for all servers together
    parallel      servers at once
    start_limit   seconds that a server may take to start
    answer_limit  seconds that one answer may take; after two that take longer, a server is not asked any more
    save_reference  file for what was observed of the reference
    rows, max_tokens  rows that are scored, and tokens of an answer
    drafts        tokens drafted per step
    """

    tp: int = 1
    quick: bool = False
    data: Data | None = None
    soak_seconds: float = 0.0
    logs: Path | None = None
    vllm_args: tuple[str, ...] = ()
    capability: str | None = None
    memory: float = MEMORY
    parallel: int = 1
    start_limit: float = START_LIMIT
    answer_limit: float = TIME_LIMIT
    save_reference: Path | None = None
    rows: int | None = None
    max_tokens: int | None = None
    drafts: int = DRAFTS

    @property
    def answer_tokens(self) -> int:
        """Of the longest answer."""
        return self.max_tokens or (QUICK_TOKENS if self.quick else MAX_TOKENS)

    @property
    def max_model_len(self) -> int:
        """Context of the servers: `--max-model-len` among `vllm_args`, or the default."""
        words = " ".join(self.vllm_args).replace("=", " ").split()
        given = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--max-model-len"]
        return int(given[-1]) if given and given[-1].isdecimal() else MAX_MODEL_LEN


def validate(
    out: str | os.PathLike[str],
    *,
    reference: str | os.PathLike[str] | None = None,
    reference_record: str | os.PathLike[str] | None = None,
    vllm: str | None = None,
    url: str | None = None,
    server_log: str | os.PathLike[str] | None = None,
    listener: events.Listener = events.ignore,
    **options: Any,
) -> Validation:
    """Serve a checkpoint with vLLM, in several ways, and judge what comes out. `options` are those of `Options`.

    reference         the checkpoint that it was made from: it is served, too
    reference_record  what `save_reference` wrote of it, on this machine or another
    vllm              a `vllm` executable, a Python that has it, or a command; `vllm` on PATH by default
    url, server_log   instead of `vllm`: a server that runs, and the file that its output went to

    Raises EnvironmentMissing when there is no engine, CheckpointError when the folder cannot be read, UsageError for
    what does not go together. A fault that was found is no error: it is the verdict.
    """
    chosen = Options(**options)
    _refuse(reference, reference_record, vllm, url, server_log, chosen)
    folder = folder_of(out)
    original = None if reference is None else folder_of(reference)
    logs = chosen.logs or place_beside(folder, f"{_name(out)}.validate")
    log = logs / f"{Role.CANDIDATE}.log" if server_log is None else Path(server_log)
    checkpoint = Checkpoint.open(folder, strict=False)
    job = _Job(folder, str(out), log, checkpoint, chosen, listener, original, reference_record)
    if url is not None and server_log is not None:
        return _served(job, url, server_log)
    return _started(job, vllm)


def _refuse(
    reference: object, record: object, vllm: str | None, url: str | None, server_log: object, chosen: Options
) -> None:
    if url is not None and vllm is not None:
        raise UsageError("--url is a server that runs, --vllm starts one", hint="pass one of them")
    if (url is None) != (server_log is None):
        raise UsageError(
            "a server that runs is judged by its answers and its log", hint="pass --url URL and --server-log FILE"
        )
    if reference is not None and record is not None:
        raise UsageError("the reference is either served or read from a record", hint="pass one of them")
    if url is not None and reference is not None:
        raise UsageError("with --url nothing is started", hint="pass --reference-record FILE instead of --reference")
    if chosen.save_reference is not None and reference is None:
        raise UsageError("--save-reference keeps what a served reference shows", hint="pass --reference SRC")
    if url is not None and chosen.soak_seconds:
        raise UsageError("a soak watches the server's processes", hint="let this command start it: pass --vllm")
    if chosen.capability is not None:
        require_capability(chosen.capability)
    for name in ("tp", "parallel", "drafts", "rows", "max_tokens", "start_limit", "answer_limit"):
        value = getattr(chosen, name)
        if value is not None and not value > 0:
            raise UsageError(f"{name} is {value}", hint="pass a positive number")
    require_share(chosen.memory)
    require_own_words(chosen.vllm_args)
    if chosen.max_model_len - chosen.answer_tokens < 64:
        raise UsageError(
            f"--max-model-len {chosen.max_model_len} leaves no room for prompts before {chosen.answer_tokens} tokens",
            hint="pass a larger one, or a smaller --max-tokens",
        )


@dataclass(frozen=True)
class _Job:
    """What both ways have in common: `called` is how the user spells the result, `log` the candidate's."""

    out: Path
    called: str
    log: Path
    checkpoint: Checkpoint
    options: Options
    listener: events.Listener
    reference: Path | None
    record: str | os.PathLike[str] | None

    @property
    def drafts(self) -> bool:
        return has_draft_head(self.checkpoint)

    def prompts(self) -> Prompts:
        """What is asked: the same for every run, and for every run of this command."""
        chosen = self.options
        rows = chosen.rows or (QUICK_ROWS if chosen.quick else ROWS)
        room = chosen.max_model_len - chosen.answer_tokens - 8
        return prompts_of(self.checkpoint, chosen.data, rows=rows, asks=ASKS, room=room)

    @property
    def thresholds(self) -> Thresholds:
        from sparkquant.limits import limits_of

        return thresholds_of(limits_of(self.out))


def _machine(chosen: Options) -> tuple[str, dict[str, Any]]:
    """(capability, what the machine is)"""
    seen = look()
    capability = chosen.capability or (seen.gpus[0].capability if seen.gpus else "")
    return capability, {
        "gpus": [gpu.model_dump(mode="json") for gpu in seen.gpus], "driver": seen.driver, "cuda": seen.cuda,
        "architecture": seen.architecture, "variables": seen.variables,
    }  # fmt: skip


def _started(job: _Job, vllm: str | None) -> Validation:
    """Servers of our own."""
    chosen = job.options
    command = command_of(vllm)
    version = version_of(command)
    engine = engine_named(version)
    capability, machine = _machine(chosen)
    before = preflight(job.out, version, chosen.tp, capability, job.listener)
    prompts = job.prompts() if before.report.ok else Prompts(rows=(), asks=())
    base = _base(chosen)
    conditions = conditions_of(
        engine="vllm", version=version, command=[Path(command[0]).name, *command[1:]], capability=capability,
        machine=machine, tp=chosen.tp, quick=chosen.quick, prompts=counts(prompts), max_tokens=chosen.answer_tokens,
        arguments=[*base, *chosen.vllm_args], parallel=chosen.parallel, environment={ATOMIC_ADD: "1"},
    )  # fmt: skip
    if not before.report.ok:
        return _refused(job, before, conditions)
    logs = writable_folder(job.log.parent)
    if chosen.save_reference is not None:
        writable_file(chosen.save_reference)
    recorded, about = (None, {}) if job.record is None else load_reference(job.record, prompts)
    tasks = tasks_of(
        str(job.out), DIALECTS[engine.rules], before.schemes, before.experts, quick=chosen.quick,
        reference=None if job.reference is None else str(job.reference), drafts=chosen.drafts if job.drafts else 0,
        reference_drafts=chosen.drafts if job.reference is not None and _drafts(job.reference) else 0,
    )  # fmt: skip
    bench = Bench(
        command, prompts, logs, base, chosen.vllm_args, chosen.answer_tokens, chosen.start_limit, chosen.answer_limit
    )
    soaked: dict[str, Any] = {}

    def after(client: Client, server: Server, asked: Asked) -> None:
        load = Load(prompts, asked["answers"][1], asked["scores"], chosen.answer_tokens)
        soaked.update(soak(client, server, load, chosen.soak_seconds, job.listener))

    seen = run_all(
        tasks, bench, parallel=chosen.parallel, listener=job.listener, after=after if chosen.soak_seconds else None
    )
    for role, run in seen.items():
        _keep_answers(logs / f"{role}.answers.json", run, prompts)
    if chosen.save_reference is not None and Role.REFERENCE in seen and not seen[Role.REFERENCE].failed:
        save_reference(chosen.save_reference, seen[Role.REFERENCE], prompts.digest, {"capability": capability})
    if recorded is not None:
        seen = {**seen, Role.REFERENCE: recorded}
    expected = tuple(task.role for task in tasks)
    notes = [engine.note] if engine.note else []
    notes += [] if capability.startswith("12.") else [f"measured on capability {capability}: says nothing of a GB10"]
    notes += ["no other dense kernel takes these weights on this engine"] if Role.BACKEND not in expected else []
    conditions = {**conditions, "reference_record": about, "environment": _environments(seen)}
    return _judged(job, before, prompts, seen, expected, conditions, capability, soaked or None, notes)


def _served(job: _Job, url: str, server_log: str | os.PathLike[str]) -> Validation:
    """One server that somebody else started: as it is, with no controls."""
    chosen = job.options
    first = read_log_file(server_log)
    with Client(url, limit=chosen.answer_limit) as client:
        served, running = client.model, client.version()
        version = running or first.version
        capability = chosen.capability or first.capability
        tp = first.tensor_parallel or chosen.tp
        before = preflight(job.out, version if first.dialect else "", tp, capability, job.listener)
        prompts = job.prompts() if before.report.ok else Prompts(rows=(), asks=())
        conditions = conditions_of(
            engine=str(first.engine), version=version, url=True, served=served, capability=capability, tp=tp,
            quick=chosen.quick,
            prompts=counts(prompts), max_tokens=chosen.answer_tokens, arguments=_plain(first.arguments),
        )  # fmt: skip
        if not before.report.ok:
            return _refused(job, before, conditions)
        asked = questions(client, prompts, (1, CONCURRENCY), chosen.answer_tokens)
    log = read_log_file(server_log)
    doubts = list(_doubts(first, log, running))
    run = Observation(Role.CANDIDATE, Settings(), log, doubts=doubts, **asked)
    seen = {Role.CANDIDATE: run}
    if log.speculation is not None:
        seen[Role.DRAFTING] = replace(run, role=Role.DRAFTING)
    about: dict[str, Any] = {}
    if job.record is not None:
        seen[Role.REFERENCE], about = load_reference(job.record, prompts)
    notes = ["one server as it runs: no controls, so a fault cannot be told from another"]
    conditions["reference_record"] = about
    return _judged(job, before, prompts, seen, (Role.CANDIDATE,), conditions, capability, None, notes)


def _doubts(before: ServerLog, after: ServerLog, running: str) -> Iterator[str]:
    """Whether the log is the one of the server that answered."""
    if running and before.version and running != before.version:
        yield f"the log of this server: it is vLLM {running}, the log is of {before.version}"
    if after.lines == before.lines and not after.arguments.get("disable_uvicorn_access_log"):
        yield "the log of these answers: no line came to it while the server answered"


def _base(chosen: Options) -> tuple[str, ...]:
    """The command line of every server."""
    words = [
        "--no-enable-prefix-caching", "--max-model-len", str(MAX_MODEL_LEN),
        "--gpu-memory-utilization", f"{chosen.memory / chosen.parallel:.3f}",
    ]  # fmt: skip
    return (*words, *(("--tensor-parallel-size", str(chosen.tp)) if chosen.tp > 1 else ()))


def _drafts(reference: Path) -> bool:
    return has_draft_head(Checkpoint.open(reference, strict=False))


def _name(out: str | os.PathLike[str]) -> str:
    """The last part of what the user calls the result."""
    path = Path(out)
    return path.resolve().name if path.exists() else path.name


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _environments(seen: Mapping[Role, Observation]) -> dict[str, Any]:
    return {str(role): dict(run.settings.environment) for role, run in seen.items()}


def _keep_answers(path: Path, run: Observation, prompts: Prompts) -> None:
    """Texts for people to read, beside the logs."""
    told = {
        str(concurrency): [
            {"kind": ask.kind, "prompt_tokens": len(ask.ids), **answer.model_dump(mode="json")}
            for ask, answer in zip(prompts.asks, answers, strict=True)
        ]
        for concurrency, answers in run.answers.items()
    }
    path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _refused(job: _Job, before: Preflight, conditions: dict[str, Any]) -> Validation:
    """The static gate is red: nothing is started."""
    failed = before.report.failed
    evidence = tuple(
        Evidence(what=check.message, source="static", where=check.id, points=Outcome.CHECKPOINT_FAULT)
        for check in failed
    )
    version = conditions["version"]
    verdict = Verdict(
        outcome=Outcome.CHECKPOINT_FAULT, evidence=evidence,
        summary=f"the static gate fails ({failed[0].id}: {failed[0].message}); no server was started",
        next=f"sparkquant verify {shlex.quote(job.called)}" + (f" --engine vllm=={version}" if version else ""),
    )  # fmt: skip
    return Validation(job.called, verdict, conditions, before, {}, None, job.thresholds)


def _judged(
    job: _Job,
    before: Preflight,
    prompts: Prompts,
    seen: dict[Role, Observation],
    expected: Sequence[Role],
    conditions: dict[str, Any],
    capability: str,
    soaked: dict[str, Any] | None,
    notes: Sequence[str],
) -> Validation:
    reference = seen.get(Role.REFERENCE)
    usable = reference is not None and not reference.failed
    scores = reference.scores if reference is not None and usable and not reference.scoring else None
    reference_lengths = lengths_of(reference) if reference is not None and usable else (0.0, 0)
    compared: Comparisons = compare(seen, prompts, scores, reference_lengths)
    case = Case(
        out=job.called, log=str(job.log), tp=conditions["tp"], seen=seen, compared=compared,
        thresholds=job.thresholds, wanted=before.wanted,
        expected=tuple(expected), drafts=job.drafts and (Role.DRAFTING in seen or Role.DRAFTING in expected),
        capability=capability,
        reference_acceptance=reference.acceptance if reference is not None and usable else None,
    )  # fmt: skip
    verdict = decide(case)
    if soaked is not None:
        limit = case.thresholds.between_controls(compared.floor)
        verdict = after_soak(verdict, soaked, limit, look_closer(case))
    origin = "" if reference is None else "record" if job.record is not None else "run"
    if job.options.quick:
        notes = [*notes, f"quick: {', '.join(QUICK)} alone"]
    return Validation(
        job.called, verdict, conditions, before, seen, compared, case.thresholds, origin, soaked, tuple(notes)
    )
