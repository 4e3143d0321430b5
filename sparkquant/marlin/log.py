"""`read_log`: the log of a server process -> `ServerLog`. Pure: no clock, no machine, no engine."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any

from sparkquant.engine.versions import engine_named
from sparkquant.errors import UsageError
from sparkquant.marlin import log_facts as facts
from sparkquant.marlin.log_lines import (
    ANSI,
    CONTAINER,
    FAMILIES,
    HEADER,
    KERNELS,
    NOTICES,
    PROCESS,
    SCHEMES,
    SGLANG_HEADER,
    WHOSE,
)
from sparkquant.marlin.log_trace import MAX_TEXT, Trace, merged
from sparkquant.marlin.server_log import End, Engine, Fault, KernelLine, Model, Notice, Phase, ServerLog, Speculation
from sparkquant.marlin.verdict import Outcome

MAX_LINE = 1 << 16
"""Characters of a line that are read; vLLM's own longest is about 5,000."""
MAX_NOTICES = 1000
MAX_PROCESSES = 4096
"""Whose lines are told apart; ranks of the largest servers are a few hundred."""

__all__ = ["ServerLog", "kernel_family", "read_log", "read_log_file"]


def read_log(lines: Iterable[str]) -> ServerLog:
    """What the lines say, with or without their line ends. Of several runs in one log, the last is described."""
    reader = _Reader()
    cut = ended = False
    for line in lines:
        cut, ended = not line.endswith("\n"), ended or line.endswith("\n")
        reader.feed(line)
    return reader.finish(truncated=cut and ended)


def read_log_file(path: str | os.PathLike[str]) -> ServerLog:
    """The same from a file of any size, a pipe, or a packed log. Raises UsageError when it cannot be read."""
    hint = "pass the file that the server's output went to"
    try:
        with Path(path).open("rb") as file, _unpacked(file) as data, _text(data) as text:
            return read_log(_bounded(text.readline))
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read: {why}", hint=hint) from None
    except ValueError as error:
        raise UsageError(f"{str(path)[:200]!r}: cannot be read: {error}", hint=hint) from None


def _unpacked(file: BufferedReader) -> BufferedReader | gzip.GzipFile:
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file


def _text(data: BufferedReader | gzip.GzipFile) -> TextIOWrapper:
    """UTF-8, or what some shells write when output is redirected; bytes that are no text become a mark."""
    wide = data.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff")
    return TextIOWrapper(data, encoding="utf-16" if wide else "utf-8-sig", errors="replace", newline="")


def _bounded(readline: Any) -> Iterator[str]:
    """Lines, long ones in their first part alone."""
    while line := readline(MAX_LINE):
        if not line.endswith("\n"):
            while (rest := readline(MAX_LINE)) and not rest.endswith("\n"):
                pass
            line = line + "\n" if rest else line
        yield line


class _Reader:
    """The state of one pass over the lines."""

    def __init__(self) -> None:
        self.number = 0
        self.runs = 0
        self.earlier: Notice | None = None
        self._reset()

    def _reset(self) -> None:
        self.values: dict[str, Any] = {}
        self.arguments: dict[str, Any] = {}
        self.kernels: list[KernelLine] = []
        self.notices: list[Notice] = []
        self.drafts: list[Any] = []
        self.traces: dict[str, Trace] = {"": Trace()}
        self.drafters: set[str] = set()
        self.loads: dict[str, list[float]] = {}
        self.engine = Engine.UNKNOWN
        self.phase = Phase.START
        self.whose = ""
        self.seen: set[str] = set()

    @property
    def model(self) -> Model:
        """Which model the process that writes is loading; workers of one server are not equally far."""
        return Model.DRAFTER if self.whose in self.drafters else Model.MAIN

    @property
    def trace(self) -> Trace:
        """Of the process that writes: lines of several traces come mixed."""
        return self.traces[self.whose]

    def feed(self, line: str) -> None:
        """One line. Most lines of a long log are requests and tell nothing new."""
        self.number += 1
        if facts.ACCESS.match(line):
            if "request" not in self.seen and facts.REQUEST.search(line):
                self.seen.add("request")
            return
        text = line[:MAX_LINE]
        if "\x1b" in text:
            text = ANSI.sub("", text)
        # Progress bars go back to the beginning of their line, and what comes next may share it with them.
        for part in text.rstrip("\r\n").split("\r"):
            self._part(CONTAINER.sub("", part, count=1))

    def _part(self, text: str) -> None:
        self._turn(text)
        # The patterns look far for where a header begins; what they cannot do without is found sooner.
        if "[" in text and (header := HEADER.match(text)):
            self._restart(text[header.end() :])
            self.engine = Engine.VLLM
            self._message(text[header.end() :], header[1], header[2])
        elif "[2" in text and (header := SGLANG_HEADER.match(text)):
            message = text[header.end() :]
            if facts.SGLANG_SIGNS.search(message):
                self.engine = Engine.SGLANG
            self._message(message, "INFO" if self.engine is Engine.SGLANG else "", "")
        else:
            self._raw(PROCESS.sub("", text, count=1), text)

    def _turn(self, text: str) -> None:
        """Whose line it is. One without a name may belong to what the last process was about to say."""
        named = WHOSE.match(text) if "pid=" in text else None
        if named is None:
            if self.whose and not self.trace.expects(text, self.number):
                self.whose = ""
            return
        self.whose = named[1] if named[1] in self.traces or len(self.traces) < MAX_PROCESSES else ""
        if self.whose not in self.traces:
            self.traces[self.whose] = Trace()

    def _restart(self, message: str) -> None:
        """A second start in the same file begins a new run; how the earlier one ended is kept."""
        if not facts.ARGUMENTS.search(message):
            return
        self.runs += 1
        if self.runs > 1:
            self.earlier = self._how_it_ended() or self.earlier
            self._reset()

    def _how_it_ended(self) -> Notice | None:
        """What a run that another one follows leaves behind, None when it ended in order."""
        fatal = next((fault for fault in self._faults() if fault.fatal), None)
        if fatal is not None:
            return Notice(
                id="restarted", fails=True, points=fatal.points, detail=fatal.id, line=fatal.line, text=fatal.text,
                meaning="the server had ended with a fault and was started again",
            )  # fmt: skip
        if "orderly" in self.seen:
            return None
        return Notice(
            id="restarted", fails=True, points=Outcome.INCONCLUSIVE, detail="killed", line=self.number,
            text="a new start", meaning="an earlier run in this log has no end: it was killed, and started again",
        )  # fmt: skip

    def _raw(self, message: str, whole: str) -> None:
        """A line without a header: traces, uvicorn, shells, the exit of the process."""
        if facts.SERVED.search(message):
            self.seen.add("served")
        if facts.API_SERVER.search(message):
            self.seen.add("api")
        if facts.ORDERLY.search(message) or facts.ORDERLY.search(whole):
            self.seen.add("orderly")
        if facts.REQUEST.search(message) and message.lstrip().startswith("INFO:"):
            self.seen.add("request")
        self.trace.feed(message, "", "", self.phase, self.number)

    def _message(self, message: str, level: str, file: str) -> None:
        if message.startswith("Received request "):
            return  # it quotes a prompt, which may hold any of these lines
        self._facts(message)
        if level != "DEBUG":
            self._kernel(message)
            self._notice(message)
        if not message.startswith("Dumping "):
            self.trace.feed(message, level, file, self.phase, self.number)

    def _kernel(self, message: str) -> None:
        for row in KERNELS:
            match = row.pattern.search(message) if row.implied else row.pattern.match(message)
            if match is None:
                continue
            layers = row.layers or match[2]
            kernel = "Marlin" if row.implied else match[1]
            found = KernelLine(
                kernel=kernel, family=row.implied or kernel_family(kernel), scheme=_scheme(layers, kernel),
                layers=layers, experts=row.experts, model=self.model, implied=bool(row.implied), line=self.number,
                text=message[:MAX_TEXT],
            )  # fmt: skip
            same = ("kernel", "layers", "experts", "model")
            if not any(all(getattr(k, name) == getattr(found, name) for name in same) for k in self.kernels):
                self.kernels.append(found)
            return

    def _notice(self, message: str) -> None:
        for row in NOTICES:
            match = row.pattern.search(message)
            if match is None:
                continue
            detail = next((group for group in match.groups() if group), "")
            known = any((notice.id, notice.detail) == (row.id, detail) for notice in self.notices)
            if not known and len(self.notices) < MAX_NOTICES:
                self.notices.append(
                    Notice(id=row.id, fails=row.fails, points=row.points, meaning=row.meaning, detail=detail,
                           line=self.number, text=message[:MAX_TEXT])
                )  # fmt: skip
            return

    def _facts(self, message: str) -> None:
        values = self.values
        if version := facts.VLLM_VERSION.search(message):
            values["version"] = version[1] or version[2]
            self.seen |= {"api"} if version[1] else set()
        if facts.VLLM_CONFIG.search(message):
            values.update(facts.settings(message, facts.SETTINGS))
        if given := facts.ARGUMENTS.search(message):
            self.arguments = facts.arguments(given[1])
        if given := facts.SGLANG_ARGUMENTS.search(message):
            values.update(facts.settings(given[1], facts.SGLANG_SETTINGS))
        if facts.API_SERVER.search(message):
            self.seen.add("api")
        if draft := facts.drafting(message, self.number):
            self.drafts.append(draft)
        if facts.REQUEST.search(message):
            self.seen.add("request")
        if attention := facts.ATTENTION.search(message):
            values["attention"] = attention[1] or attention[2]
        if capability := facts.CAPABILITY.search(message):
            values["capability"] = f"{capability[1]}.{capability[2]}"
        self._progress(message)
        self._sizes(message)

    def _progress(self, message: str) -> None:
        if facts.LOADING.search(message):
            self.phase = Phase.LOAD
        if facts.DRAFTER.search(message):
            self.drafters.add(self.whose)
            self.seen.add("drafter")
        if facts.GRAPHS.search(message):
            self.seen.add("graphs")
        if facts.STARTED.search(message) or facts.FIRED_UP.search(message):
            self.phase = Phase.SERVING
            self.seen.add("started")
        if facts.STOPPING.search(message):
            self.phase = Phase.SHUTDOWN
        if facts.STOPPED.search(message):
            self.seen.add("stopped")

    def _sizes(self, message: str) -> None:
        values = self.values
        if loaded := facts.LOADED.search(message):
            self._loaded(float(loaded[1]), float(loaded[2]))
            self.phase = Phase.WARM_UP
            self.drafters.discard(self.whose)
        if loaded := facts.SGLANG_LOADED.search(message):
            values["load_seconds"], values["load_gib"] = float(loaded[1]), float(loaded[2])
            self.phase = Phase.WARM_UP
        if memory := facts.KV_MEMORY.search(message):
            self._least("kv_cache_gib", float(memory[1]))
        if tokens := facts.KV_TOKENS.search(message) or facts.SGLANG_KV.search(message):
            self._least("kv_cache_tokens", facts.count(tokens[1]))
        if most := facts.CONCURRENCY.search(message):
            values["max_model_len"], values["max_concurrency"] = facts.count(most[1]), float(most[2])

    def _loaded(self, gib: float, seconds: float) -> None:
        """Ranks load alike; the largest of them is what every device needs."""
        self.loads[self.whose] = [gib, seconds]
        self.values["load_gib"], self.values["load_seconds"] = map(max, zip(*self.loads.values(), strict=True))

    def _least(self, name: str, value: float) -> None:
        """Of what all ranks have: the smallest one bounds the others."""
        self.values[name] = min(self.values.get(name, value), value)

    def _faults(self) -> tuple[Fault, ...]:
        return merged(self.traces.values(), stopped="stopped" in self.seen)

    def finish(self, *, truncated: bool) -> ServerLog:
        """All of it."""
        values, faults = self.values, self._faults()
        version = values.get("version", "")
        dead = any(fault.fatal for fault in faults)
        end = End.FAILED if dead else End.ORDERLY if "orderly" in self.seen else End.NONE
        notices = (*((self.earlier,) if self.earlier else ()), *self.notices)
        return ServerLog(
            engine=self.engine, version=version, dialect=_dialect(self.engine, version),
            model=values.get("model", "") or str(self.arguments.get("model", "")),
            quantization=values.get("quantization", ""), dtype=values.get("dtype", ""),
            capability=values.get("capability", ""), tensor_parallel=_integer(values.get("tensor_parallel")),
            arguments=self.arguments, linear_backend=values.get("linear_backend", ""),
            moe_backend=values.get("moe_backend", ""), eager=self._eager(), graphs="graphs" in self.seen,
            kernels=tuple(_settled(self.kernels)), notices=notices, faults=faults,
            load_gib=values.get("load_gib"), load_seconds=values.get("load_seconds"),
            kv_cache_gib=values.get("kv_cache_gib"), kv_cache_tokens=values.get("kv_cache_tokens"),
            max_concurrency=values.get("max_concurrency"), max_model_len=_integer(values.get("max_model_len")),
            speculation=self._speculation(), drafting=tuple(self.drafts), attention=values.get("attention", ""),
            started=self._started(), requests="request" in self.seen, end=end, truncated=truncated,
            missing=tuple(self._missing()), runs=max(1, self.runs), lines=self.number,
        )  # fmt: skip

    def _started(self) -> bool:
        return "started" in self.seen and ("api" not in self.seen or "served" in self.seen)

    def _eager(self) -> bool | None:
        told = self.values.get("eager") or self.values.get("no_graphs")
        return None if told is None else told == "True"

    def _speculation(self) -> Speculation | None:
        method = self.values.get("method")
        if method is None:
            return None
        tokens = _integer(self.values.get("tokens"))
        return Speculation(method=method, tokens=tokens, drafter_loaded="drafter" in self.seen)

    def _missing(self) -> Iterator[str]:
        values = self.values
        if self.engine is Engine.UNKNOWN:
            yield "any line of vLLM or SGLang"
        if "version" not in values:
            yield "the engine's version"
        if not self.kernels and values.get("quantization") != "None":
            yield "a line that names the kernel of a quantized layer"
        if "load_gib" not in values:
            yield "the memory that the weights took"
        if "kv_cache_tokens" not in values:
            yield "the size of the KV cache"
        if self._eager() is False and values.get("graph_mode") != "NONE" and "graphs" not in self.seen:
            yield "the capture of CUDA graphs, which are on"
        if values.get("method") == "mtp" and "drafter" not in self.seen:
            yield "the load of the draft head, which is on"
        if not self._started():
            yield "the end of the start-up"


def _settled(kernels: list[KernelLine]) -> Iterator[KernelLine]:
    """Without what another line says better: a warning beside a kernel line, a class of experts beside its backend."""
    for kernel in kernels:
        others = [k for k in kernels if not k.implied and k is not kernel and k.model == kernel.model]
        marlin = any(k.family == kernel.family and k.scheme in (kernel.scheme, "mxfp4") for k in others)
        if kernel.implied and marlin:
            continue
        backend = any(k.layers == "WNA16 MoE" for k in others)
        if kernel.layers == "CompressedTensors MoE" and kernel.family != "marlin" and backend:
            continue
        yield kernel


def kernel_family(kernel: str) -> str:
    """`MarlinNvFp4LinearKernel`, `BATCHED_MARLIN`, `marlin` -> `marlin`; `other` for a name that says nothing."""
    name = kernel.lower().replace("_", "")
    found = next((family for family in FAMILIES if family in name or family.replace("-", "") in name), "")
    return found or ("triton" if name.startswith("compressedtensors") else "other")


def _scheme(layers: str, kernel: str) -> str:
    for text in (layers, kernel):
        for scheme, pattern in SCHEMES:
            if pattern.search(text):
                return scheme
    return "other"


def _dialect(engine: Engine, version: str) -> str:
    """The spelling of a version; "" where its rules were not read."""
    if engine is not Engine.VLLM or not version:
        return ""
    try:
        return engine_named(version).rules
    except UsageError:
        return ""


def _integer(text: Any) -> int | None:
    return None if text is None else int(text)
