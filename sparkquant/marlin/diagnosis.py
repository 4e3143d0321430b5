"""`diagnose`: the triage of a server or a checkpoint that anyone made. It names a suspect and the next command.

log        which kernels ran, what failed         ┐
static     verify: is the checkpoint sound        ├─> suspect, verdict, next command
symptom    structurally broken, or merely poor    ┘
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkquant import events
from sparkquant.engine.versions import require_capability
from sparkquant.errors import UsageError
from sparkquant.marlin.cuda_error import explain
from sparkquant.marlin.installation import find_vllm
from sparkquant.marlin.known_bad import KnownBad, concerns, known_bad
from sparkquant.marlin.log import read_log_file
from sparkquant.marlin.log_verdict import judge_log
from sparkquant.marlin.noun import Noun
from sparkquant.marlin.server_log import ServerLog
from sparkquant.marlin.suspicion import Case, Suspect, conclude
from sparkquant.marlin.symptom import Kind, Symptom, classify, examine_server
from sparkquant.marlin.verdict import Verdict
from sparkquant.report import Report
from sparkquant.source import folder_of

MAX_TEXT = 1 << 20
"""Bytes of an answer that are read."""


class Diagnosis(Noun):
    """`explanation` speaks of a CUDA error of the log; `known` are rows for the kernels that ran on this chip."""

    subject: str
    capability: str
    log: ServerLog | None
    symptom: Symptom | None
    explanation: tuple[str, ...]
    known: tuple[KnownBad, ...]
    suspect: Suspect
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; the verdict's outcome is its own field at the top."""
        told = self.model_dump(mode="json")
        complete = None if self.log is None else self.log.complete
        return {"outcome": str(self.verdict.outcome), "log_complete": complete, **told}


def diagnose(
    model: str | os.PathLike[str] | None = None,
    *,
    url: str | None = None,
    server_log: str | os.PathLike[str] | None = None,
    answer: str | os.PathLike[str] | None = None,
    capability: str | None = None,
    vllm: str | None = None,
    listener: events.Listener = events.ignore,
) -> Diagnosis:
    """Everything that can be known from what was passed.

    model       a checkpoint folder or a hub id: it is verified, by the rules of the version that the log names
    url         a running server: asked the same greedy prompts alone, again, and eight at once
    server_log  what a server printed, whole
    answer      a file with text that the server generated
    capability  the chip that the server runs on, as 12.1; logs do not say it
    vllm        the installation that the server runs from: its compiled code is read
    Raises UsageError when nothing was passed, or what was passed cannot be read.
    """
    if model is None and url is None and server_log is None and answer is None:
        raise UsageError(
            "nothing to diagnose", hint="pass a model folder, --server-log FILE, --url URL or --answer FILE"
        )
    if capability is not None:
        require_capability(capability)
    log = None if server_log is None else read_log_file(server_log)
    symptom = examine_server(url) if url is not None else None if answer is None else classify(_text(answer))
    chip = capability or (log.capability if log else "")
    installation = None if vllm is None else find_vllm(vllm)
    report = None if model is None else _static(model, log, chip, listener)
    known = tuple(_known(log, chip))
    alive = symptom is not None and url is not None and symptom.kind is not Kind.SILENT
    case = Case(
        model="" if model is None else str(model), log=log, report=report, symptom=symptom, known=known,
        logged=None if log is None else judge_log(log, alive=alive),
    )  # fmt: skip
    suspect, verdict = conclude(case)
    return Diagnosis(
        subject=str(model or url or server_log or answer), capability=chip, log=log, symptom=symptom,
        explanation=explain(log, chip, installation) if log else (), known=known, suspect=suspect, verdict=verdict,
    )  # fmt: skip


def _text(path: str | os.PathLike[str]) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_TEXT).decode("utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", hint="pass a file with generated text") from None


def _static(model: str | os.PathLike[str], log: ServerLog | None, capability: str, listener: events.Listener) -> Report:
    """The static gate, by the rules of the version that ran and on its chip, where both are known."""
    from sparkquant.verification.gate import verify

    engine = log.version if log is not None and log.dialect else None
    ranks = (log.tensor_parallel or 1,) if log is not None else (1,)
    return verify(folder_of(model), engine=engine, tp=ranks, capability=capability or None, listener=listener)


def _known(log: ServerLog | None, capability: str) -> Iterator[KnownBad]:
    """Rows for the kernels that ran on this chip; without a log nothing is known of kernels."""
    if log is None or not capability:
        return
    for row in known_bad(capability, log.version):
        if any(concerns(row, kernel, log.graphs) for kernel in log.kernels):
            yield row
