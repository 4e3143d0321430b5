"""`ServerLog`: everything that the log of one server process says, and what it does not say."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sparkquant.marlin.noun import Noun
from sparkquant.marlin.verdict import Outcome

DIALECTS = ("0.25", "0.26", "0.33")
"""Versions of vLLM whose log lines were read."""


class Engine(StrEnum):
    """Who wrote the log; UNKNOWN where no line says so."""

    VLLM = "vllm"
    SGLANG = "sglang"
    UNKNOWN = "unknown"


class Model(StrEnum):
    """Whose layers a line speaks of. A class that the main model announced is not announced again for the drafter."""

    MAIN = "main"
    DRAFTER = "drafter"


class KernelLine(Noun):
    """One kernel that the engine says it uses.

    kernel   the class or backend as the log spells it
    family   what it is: `marlin`, `machete`, `cutlass`, `flashinfer`, `triton`, `humming`, `emulation`, ...
    scheme   `int`, `nvfp4`, `fp8`, `mxfp4`, `mxfp8`, `int8` (integer activations), `none` (16-bit experts) or `other`
    layers   what the line says it serves: `CompressedTensorsWNA16`, `NVFP4 GEMM`, `WNA16 MoE`
    experts  experts of a mixture, not dense layers
    implied  no kernel line, but a warning that only this kernel prints
    """

    kernel: str
    family: str
    scheme: str
    layers: str
    experts: bool
    model: Model
    implied: bool
    line: int
    text: str


class Notice(Noun):
    """A line that is no crash: `id` is one of `log_lines.NOTICES`; `fails` says that no run with it may pass.

    points  what it speaks for, None where it is only worth knowing
    """

    id: str
    fails: bool
    points: Outcome | None
    meaning: str
    detail: str
    line: int
    text: str


class Phase(StrEnum):
    """How far a server had come when something happened; `shutdown` once it was told to end."""

    START = "start"
    LOAD = "load"
    WARM_UP = "warm-up"
    SERVING = "serving"
    SHUTDOWN = "shutdown"


class Fault(Noun):
    """Something that stopped the engine, or part of it.

    id       one of `log_lines.FAULTS`: `import`, `illegal-instruction`, `out-of-memory`, `killed`, ...
    points   what it speaks for
    fatal    the engine ended with it; otherwise it was caught and reported as a warning
    at       deepest frame of its trace that is no part of torch or the Python library, "" without one; of a CUDA error
             that is where the host noticed, not where it happened
    """

    id: str
    points: Outcome
    meaning: str
    phase: Phase
    fatal: bool
    at: str
    line: int
    text: str


class Speculation(Noun):
    """How the server was told to speculate; `tokens` per step."""

    method: str
    tokens: int | None
    drafter_loaded: bool


class Drafting(Noun):
    """Acceptance of one interval, as the server counted it. `rates` are fractions by position, `mean_length` tokens."""

    mean_length: float | None
    rates: tuple[float, ...]
    accepted: int | None
    drafted: int | None
    line: int


class End(StrEnum):
    """What the last lines say of the process: NONE while it runs, and equally where it was killed without a word."""

    NONE = "none"
    ORDERLY = "orderly"
    FAILED = "failed"


class ServerLog(Noun):
    """The facts of one log. None and "" mean that no line said it.

    dialect           the version of `DIALECTS` whose spelling applies
    arguments         what the server was given beyond its defaults
    linear_backend, moe_backend   as configured (`auto` unless asked for): what ran is in `kernels`
    load_gib          memory of the weights after repacking; kv_cache_gib, kv_cache_tokens: the cache
    max_concurrency   requests of `max_model_len` tokens that fit the cache at once
    graphs            CUDA graphs were captured
    started           the engine said that its start-up is complete
    requests          a request reached the model
    runs              starts in this file; the last one is described
    missing           observables that a complete log of a complete run has and this one has not
    truncated         the last line stops in the middle
    """

    engine: Engine
    version: str
    dialect: str
    model: str
    quantization: str
    dtype: str
    capability: str
    tensor_parallel: int | None
    arguments: dict[str, Any]
    linear_backend: str
    moe_backend: str
    eager: bool | None
    graphs: bool
    kernels: tuple[KernelLine, ...]
    notices: tuple[Notice, ...]
    faults: tuple[Fault, ...]
    load_gib: float | None
    load_seconds: float | None
    kv_cache_gib: float | None
    kv_cache_tokens: int | None
    max_concurrency: float | None
    max_model_len: int | None
    speculation: Speculation | None
    drafting: tuple[Drafting, ...]
    attention: str
    started: bool
    requests: bool
    end: End
    truncated: bool
    missing: tuple[str, ...]
    runs: int
    lines: int

    @property
    def complete(self) -> bool:
        """Every observable of a start-up is there, and no line is cut. Says nothing of how the process ended."""
        return not self.missing and not self.truncated

    @property
    def fatal(self) -> tuple[Fault, ...]:
        """Faults that ended the engine."""
        return tuple(fault for fault in self.faults if fault.fatal)

    @property
    def failing(self) -> tuple[Notice, ...]:
        """Notices with which no run may pass."""
        return tuple(notice for notice in self.notices if notice.fails)

    def families(self, scheme: str, *, experts: bool = False, model: Model = Model.MAIN) -> tuple[str, ...]:
        """Kernel families that ran this scheme's layers; several when the layers differ."""
        ran = (k.family for k in self.kernels if (k.scheme, k.experts, k.model) == (scheme, experts, model))
        return tuple(dict.fromkeys(ran))
