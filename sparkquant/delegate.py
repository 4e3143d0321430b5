"""The child process in which another quantizer runs: `python -m sparkquant.delegate FOLDER`.

In the folder: job.json and perhaps overlay.pt come in; block-*.pt with stored tensors, log.txt and at the very end
outcome.json go out. What the user should know goes line by line, as JSON, to the standard output of the process.
Everything that the library prints, and everything it changes in its process, ends here.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparkquant.backends.work import Result, Target, Work
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import SparkquantError
from sparkquant.layouts import layout_for
from sparkquant.live import live_view
from sparkquant.requantizing import as_16_bit
from sparkquant.schemes import make_scheme
from sparkquant.weights import StoredWeights
from sparkquant.whole_model import linears, split_experts, whole_model

PIECE_BYTES = 2**30
JOB, OVERLAY, LOG, OUTCOME = "job.json", "overlay.pt", "log.txt", "outcome.json"
SPLIT_HERE = ("autoround", "modelopt")
"""Quantizers that are given experts as Linears; llm-compressor makes its own, through which all tokens can pass."""


def main(folder: Path) -> None:
    """Carry out one job."""
    _die_with_the_parent()
    channel = _silence(folder / LOG)

    def say(message: str) -> None:
        channel.write(json.dumps(message) + "\n")

    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    outcome: dict[str, Any]
    try:
        outcome = _run(job, folder, say)
    except SparkquantError as error:
        outcome = {"error": str(error)}
    _write(folder / OUTCOME, outcome)


def _die_with_the_parent() -> None:
    """A killed parent must not leave hours of work running for nobody."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _silence(log: Path) -> Any:
    """Send both streams to the log, below Python; the old standard output is the channel to the parent."""
    channel = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(target, stream)
    return channel


def _run(job: Mapping[str, Any], folder: Path, say: Any) -> dict[str, Any]:
    started = time.monotonic()
    checkpoint = as_16_bit(Checkpoint.open(job["source"]))
    overlay = torch.load(folder / OVERLAY, weights_only=True) if (folder / OVERLAY).exists() else {}
    layout = layout_for(checkpoint.config)
    with StoredWeights(checkpoint, overlay) as weights:
        model = whole_model(checkpoint, weights, layout)
        model.config.save_pretrained(folder)  # type: ignore[union-attr,operator]
        targets = list(_targets(job, model, layout))
        if job["method"] in SPLIT_HERE and any(".experts." in target.live for target in targets):
            split_experts(model)
        work = Work(model, targets, job["rows"], job["options"], job["device"], str(folder), say)
        adapter = importlib.import_module(f"sparkquant.backends.{job['method']}")
        result: Result = adapter.quantize(work)
        tampered = sorted(_tampered(model, targets, weights, layout))
        stored = _store(result, folder)
    modules = {target.live: target.module for target in targets}
    return {
        "quantized": sorted(modules.get(name, name) for name in result.quantized),
        "tampered": tampered,
        "stored": stored,
        "notes": dict(result.notes),
        "seconds": round(time.monotonic() - started, 1),
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _targets(job: Mapping[str, Any], model: nn.Module, layout: Any) -> Iterator[Target]:
    for position, linear in linears(job["decisions"], model, layout):
        decision = job["decisions"][position]
        fields = dict(decision["scheme"])
        group = decision["scale_group"]
        if decision["parts"]:  # fused experts: one global scale for each
            group = f"{group}.{linear.module.split('.')[-2]}"
        yield Target(linear.module, linear.live, make_scheme(fields.pop("scheme"), **fields), group)


def _tampered(model: nn.Module, targets: list[Target], weights: StoredWeights, layout: Any) -> Iterator[str]:
    """Tensors outside the targets that are not the source's any more: what was tuned against them would be wrong."""
    state = dict(model.state_dict())
    touched = {f"{target.live}.weight" for target in targets}
    for name in weights.names():
        key, view = live_view(name, state, layout)
        if key is None or view is None or key in touched or view.is_meta:
            continue
        if not torch.equal(view.cpu(), weights.read(name).to(view.dtype)):
            yield name


def _store(result: Result, folder: Path) -> list[str]:
    names: list[str] = []
    piece: dict[str, Tensor] = {}
    count = 0
    for module, suffix, tensor in result.stored:
        name = f"{module}.{suffix}"
        names.append(name)
        piece[name] = tensor.contiguous().clone()
        if sum(t.nbytes for t in piece.values()) > PIECE_BYTES:
            torch.save(piece, folder / f"block-{count:05d}.pt")
            piece, count = {}, count + 1
    torch.save(piece, folder / f"block-{count:05d}.pt")
    return names


def _write(path: Path, value: Mapping[str, Any]) -> None:
    """In one step: a file that is there is whole."""
    staged = path.with_suffix(".new")
    with staged.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
