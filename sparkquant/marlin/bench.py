"""Measure throughput, and with it everything that explains it.

    record = sparkquant.bench("Qwen3.5-27B-W4A16", vllm="/opt/vllm/bin/vllm")
    record.decode["fresh"].median, list(record.warnings())

Prompts are distinct, answers are greedy and end where the model ends them. One stream and all streams together are
never one number. Every width has a warm-up round that is dropped, then at least three rounds.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkquant import events
from sparkquant.checkpoint import Checkpoint
from sparkquant.engine.versions import engine_named, require_capability
from sparkquant.errors import CheckFailed, EnvironmentMissing, UsageError
from sparkquant.evaluation_data import Data
from sparkquant.events import Said
from sparkquant.marlin.bench_record import FEWEST_ROUNDS, MEASURED, BenchRecord, make_record, require_conditions
from sparkquant.marlin.client import Client, at_once
from sparkquant.marlin.controls import SERVED
from sparkquant.marlin.dialect import DIALECTS, Settings
from sparkquant.marlin.log import read_log_file
from sparkquant.marlin.machine import look
from sparkquant.marlin.metrics import CACHE_QUERIES, Acceptance
from sparkquant.marlin.places import place_beside, writable_file
from sparkquant.marlin.preflight import preflight
from sparkquant.marlin.prompts import Ask, Prompts, prompts_of
from sparkquant.marlin.replies import Completion
from sparkquant.marlin.server import (
    START_LIMIT,
    Launch,
    Server,
    command_of,
    require_own_words,
    require_share,
    version_of,
)
from sparkquant.marlin.server_log import ServerLog
from sparkquant.source import folder_of

WIDTHS = (1, 2, 4, 8)
ASKS = 16
FEWEST_REQUESTS = 4
PREFILL_TOKENS = 1024
WARM_UP = 1
MAX_TOKENS = 256
MAX_MODEL_LEN = 4096
LATER = (*MEASURED, "prompts")
PRIVATE = re.compile("KEY|TOKEN|SECRET|PASS|ROOT|PATH|DIR|CACHE|HOST|URL")


@dataclass(frozen=True, slots=True)
class Options:
    """Everything about a benchmark that has a default.

    drafts      tokens that the checkpoint's own draft head drafts per step, 0 for none
    rounds      measured rounds of every width, at least three
    engine_choice  leave the kernels to the engine instead of asking for Marlin
    thinking    let the template open a thought before the answer
    environment variables of a server at a URL; None when nobody said, which makes no record
    hardware    of a server at a URL
    """

    data: Data | None = None
    drafts: int = 0
    rounds: int = FEWEST_ROUNDS
    max_tokens: int = MAX_TOKENS
    tp: int = 1
    memory: float = 0.85
    vllm_args: tuple[str, ...] = ()
    capability: str | None = None
    hardware: str | None = None
    environment: Mapping[str, str] | None = None
    engine_choice: bool = False
    thinking: bool = False
    log: Path | None = None
    start_limit: float = START_LIMIT


def bench(
    out: str | os.PathLike[str],
    *,
    vllm: str | None = None,
    url: str | None = None,
    server_log: str | os.PathLike[str] | None = None,
    listener: events.Listener = events.ignore,
    **options: Any,
) -> BenchRecord:
    """Measure a checkpoint on a server that is started (`vllm`), or on one that runs (`url`). See `Options`.

    Raises UsageError when a condition of the record is not known, EnvironmentMissing when the server does not start,
    CheckFailed when requests fail.
    """
    chosen = Options(**options)
    if url is not None and vllm is not None:
        raise UsageError("--url is a server that runs, --vllm starts one", hint="pass one of them")
    _refuse(chosen)
    folder = folder_of(out)
    checkpoint = Checkpoint.open(folder, strict=False)
    name = folder.resolve().name if Path(out).is_dir() else Path(out).name
    known: dict[str, Any] = {"model": name, "thinking": chosen.thinking}
    if url is None:
        log = chosen.log or place_beside(folder, f"{name}.bench.log")
        return _started(checkpoint, str(out), vllm, replace(chosen, log=log), known, listener)
    told = None if server_log is None else read_log_file(server_log)
    with Client(url) as client:
        known |= _at_url(client, told, chosen)
        require_conditions(known, LATER)
        prompts = _prompts(checkpoint, chosen)
        return make_record({**measure(client, prompts, chosen, listener), **known, "prompts": prompts.digest})


def _prompts(checkpoint: Checkpoint, chosen: Options) -> Prompts:
    room = min(MAX_MODEL_LEN - chosen.max_tokens - 8, 2048)
    return prompts_of(
        checkpoint, chosen.data, rows=8, asks=ASKS, room=room, tokens=PREFILL_TOKENS, thinking=chosen.thinking
    )


def _refuse(chosen: Options) -> None:
    """UsageError for what no record can come of, before anything is started."""
    if chosen.rounds < FEWEST_ROUNDS:
        raise UsageError(f"{chosen.rounds} rounds have no honest median", hint=f"pass at least {FEWEST_ROUNDS}")
    if not 2 <= chosen.max_tokens <= MAX_MODEL_LEN // 2:
        raise UsageError(
            f"answers of {chosen.max_tokens} tokens cannot be measured", hint=f"pass 2 to {MAX_MODEL_LEN // 2}"
        )
    if chosen.drafts < 0 or chosen.tp < 1 or not chosen.start_limit > 0:
        raise UsageError("drafts, tp and the limit of the start are counts", hint="pass positive numbers")
    if chosen.capability is not None:
        require_capability(chosen.capability)
    require_share(chosen.memory)
    require_own_words(chosen.vllm_args)


def _started(
    checkpoint: Checkpoint,
    called: str,
    vllm: str | None,
    chosen: Options,
    known: dict[str, Any],
    listener: events.Listener,
) -> BenchRecord:
    command = command_of(vllm)
    version = version_of(command)
    dialect = DIALECTS[engine_named(version).rules]
    machine = look()
    capability = chosen.capability or (machine.gpus[0].capability if machine.gpus else "")
    before = preflight(checkpoint.path, version, chosen.tp, capability, listener)
    settings = Settings() if chosen.engine_choice else dialect.marlin(before.schemes, before.experts)
    settings += dialect.atomic_add(True)
    settings += dialect.drafting(chosen.drafts) if chosen.drafts else Settings()
    base = (
        "--no-enable-prefix-caching", "--max-model-len", str(MAX_MODEL_LEN),
        "--gpu-memory-utilization", f"{chosen.memory:.3f}",
    )  # fmt: skip
    ranks = ("--tensor-parallel-size", str(chosen.tp)) if chosen.tp > 1 else ()
    arguments = (*base, *ranks, *settings.arguments, *chosen.vllm_args)
    log = writable_file(chosen.log or Path(f"{called}.bench.log"))
    known |= {
        "versions": _versions(version, machine.driver), "capability": capability,
        "hardware": chosen.hardware or ", ".join(gpu.name for gpu in machine.gpus[: chosen.tp]),
        "environment": {**settings.environment, **_inherited()}, "arguments": arguments,
        "speculation": {"method": "mtp" if chosen.drafts else "none", "k": chosen.drafts},
    }  # fmt: skip
    require_conditions(known, LATER)
    prompts = _prompts(checkpoint, chosen)
    launch = Launch(
        command, (str(checkpoint.path), "--served-model-name", SERVED, *arguments),
        {"VLLM_NO_USAGE_STATS": "1", **settings.environment}, log,
    )  # fmt: skip
    closer = f"sparkquant diagnose {shlex.quote(called)} --server-log {shlex.quote(str(log))}"
    with Server(launch) as server:
        listener(Said(f"starting {command[0]}; its output goes to {log}"))
        if failed := server.wait_ready(chosen.start_limit):
            raise EnvironmentMissing(f"the server did not start: {failed}", hint=closer)
        with Client(server.url, model=SERVED) as client:
            try:
                numbers = measure(client, prompts, chosen, listener)
            except CheckFailed as error:
                raise CheckFailed(error.what, hint=closer) from None
    kv = read_log_file(log).kv_cache_tokens or numbers.get("kv_cache_tokens")
    return make_record({**numbers, **known, "prompts": prompts.digest, "kv_cache_tokens": kv})


def _inherited() -> dict[str, str]:
    """Variables of ours that the server has got, too; places and secrets are nobody's business."""
    return {
        name: value for name, value in sorted(os.environ.items())
        if name.startswith("VLLM_") and not PRIVATE.search(name)
    }  # fmt: skip


def _versions(engine: str, driver: str = "") -> dict[str, str]:
    from sparkquant import version

    return {"vllm": engine, "sparkquant": version(), **({"driver": driver} if driver else {})}


def _at_url(client: Client, log: ServerLog | None, chosen: Options) -> dict[str, Any]:
    """What a server that runs tells of itself; what it does not tell is left out, and then no record is made."""
    found: dict[str, Any] = {}
    version = client.version() or (log.version if log is not None else "")
    if version:
        found["versions"] = _versions(version)
    capability = chosen.capability or (log.capability if log is not None else "")
    if capability:
        found["capability"] = capability
    if chosen.hardware:
        found["hardware"] = chosen.hardware
    if chosen.environment is not None:
        found["environment"] = dict(chosen.environment)
    if log is not None:
        given = {
            key: value for key, value in log.arguments.items() if key not in ("model", "model_tag", "port", "host")
        }
        found["arguments"] = [f"--{key.replace('_', '-')}={value}" for key, value in sorted(given.items())]
        drafts = log.speculation
        found["speculation"] = (
            {"method": "none", "k": 0} if drafts is None else {"method": drafts.method, "k": drafts.tokens}
        )
        if log.kv_cache_tokens:
            found["kv_cache_tokens"] = log.kv_cache_tokens
    return found


def measure(
    client: Client, prompts: Prompts, chosen: Options, listener: events.Listener = events.ignore
) -> dict[str, Any]:
    """All numbers of one server, as fields of a record."""
    kinds = {
        kind: [ask for ask in prompts.asks if ask.kind == kind] for kind in dict.fromkeys(a.kind for a in prompts.asks)
    }
    state = _State(client, chosen, client.metrics().cache.get("enable_prefix_caching", "") != "False")
    begin = client.metrics()
    decode: dict[str, Any] = {}
    acceptance: dict[str, Acceptance] = {}
    for kind, asks in kinds.items():
        state.round(asks[:FEWEST_REQUESTS], 1)
        before = client.metrics()
        decode[kind] = {"rounds": state.alone(asks[:FEWEST_REQUESTS])}
        accepted = client.metrics().acceptance(before)
        if accepted is not None:
            acceptance[kind] = accepted
        listener(Said(f"measured: one stream, {kind}"))
    aggregate: dict[str, Any] = {}
    mixed = _mixed(kinds)
    for width in WIDTHS:
        asks = mixed[: max(FEWEST_REQUESTS, width)]
        state.round(asks, width)
        aggregate[str(width)] = {"rounds": [state.together(asks, width) for _ in range(chosen.rounds)]}
        listener(Said(f"measured: {width} streams"))
    prefill = state.prefill(prompts.rows)
    listener(Said("measured: prefill"))
    end = client.metrics()
    counted = not state.cached or end.since(begin, CACHE_QUERIES) is not None
    hits = end.cache_hit_rate(begin) or 0.0
    cache = {"state": "off" if not state.cached else "warm" if hits > 0 else "cold", "hit_rate": hits}
    answers = state.answers
    kv = end.cache.get("kv_cache_size_tokens", "")
    return {
        "decode": decode, "aggregate": aggregate, "acceptance": acceptance, **prefill,
        # Nobody knows whether a server that does not count its hits had some.
        **({"cache": cache} if counted else {}),
        "lengths": {
            "prompt": sum(a.prompt_tokens for a in answers) / len(answers),
            "output": sum(a.tokens for a in answers) / len(answers), "max_tokens": chosen.max_tokens,
            "ended": sum(a.finish_reason == "stop" for a in answers) / len(answers),
        },
        "distinct_prompts": len(prompts.asks), "warm_up_rounds": WARM_UP,
        **({"kv_cache_tokens": int(kv)} if kv.isdecimal() else {}),
    }  # fmt: skip


class _State:
    """A client with the answers so far."""

    def __init__(self, client: Client, chosen: Options, cached: bool) -> None:
        self.client, self.chosen, self.cached = client, chosen, cached
        self.answers: list[Completion] = []
        self._asked = 0

    def alone(self, asks: Sequence[Ask]) -> list[float]:
        """Tokens per second of one stream, by round."""
        return [_one_stream(self.round(asks, 1)) for _ in range(self.chosen.rounds)]

    def round(self, asks: Sequence[Ask], width: int, tokens: int | None = None) -> list[Completion]:
        """All of them once. Raises CheckFailed when one fails: a number without it would lie."""

        def one(ask: Ask) -> Completion:
            self._asked += 1
            salt = f"{id(self)}-{self._asked}-{time.monotonic_ns()}" if self.cached else ""
            return self.client.stream(ask.ids, tokens or self.chosen.max_tokens, salt=salt)

        answers: list[Completion] = at_once(one, asks, width)
        for answer in answers:
            if answer.error or not answer.tokens or answer.first is None:
                raise CheckFailed(
                    f"a request failed: {answer.error or 'an empty answer'}", hint="sparkquant diagnose --url URL"
                )
        if tokens is None:
            self.answers += answers
        return answers

    def together(self, asks: Sequence[Ask], width: int) -> float:
        """Tokens per second of all streams."""
        began = time.monotonic()
        answers = self.round(asks, width)
        return sum(answer.tokens for answer in answers) / (time.monotonic() - began)

    def prefill(self, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Seconds to the first token of long prompts, one at a time, and the rate at which they were read."""
        asks = [Ask(kind="prefill", ids=tuple(row)) for row in rows[:FEWEST_REQUESTS]]
        self.round(asks, 1, 1)
        firsts, rates = [], []
        for _ in range(self.chosen.rounds):
            answers = self.round(asks, 1, 1)
            seconds = [answer.first or 0.0 for answer in answers]
            firsts.append(sum(seconds) / len(seconds))
            rates.append(sum(answer.prompt_tokens for answer in answers) / max(sum(seconds), 1e-9))
        return {"prefill": {"rounds": rates}, "first_token": {"rounds": firsts}}


def _one_stream(answers: Sequence[Completion]) -> float:
    """Tokens after the first one, per second after it."""
    tokens = sum(answer.tokens - 1 for answer in answers)
    seconds = sum(answer.seconds - (answer.first or 0.0) for answer in answers)
    return tokens / max(seconds, 1e-9)


def _mixed(kinds: Mapping[str, Sequence[Ask]]) -> list[Ask]:
    """Kinds in turns."""
    longest = max(map(len, kinds.values()))
    return [asks[i] for i in range(longest) for asks in kinds.values() if i < len(asks)]
