"""Methods of other quantizers as a backend: run one in a process of its own, check what it did, hand out its tensors.

    plan + source + rows -> work folder -> child (`sparkquant.delegate`) -> stored tensors -> the project's writer

The child is given exact module names. It reports every module that it really quantized, and every kept tensor that it
changed: anything but the plan is an error, before a byte is written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sparkquant.backend_job import BackendJob
from sparkquant.calibrated import PreparedBackend
from sparkquant.calibration.private_folder import private_folder
from sparkquant.decisions import Decision, Plan
from sparkquant.device import usable_device
from sparkquant.errors import CheckFailed, EnvironmentMissing, Problem, Resumable, SparkquantError, UsageError
from sparkquant.events import Listener, Said
from sparkquant.layers import LayerClass
from sparkquant.memory import available_bytes
from sparkquant.quantizers import Quantizer, quantizer_of, require_device

CHILD = ("-P", "-m", "sparkquant.delegate")
"""Arguments of the interpreter that runs a quantizer; -P keeps the current folder off its path."""

LOG_LINES = 12
"""Lines of a failed library's log that its error shows."""


@contextmanager
def delegated_backend(job: BackendJob) -> Iterator[tuple[PreparedBackend, dict[str, Any]]]:
    """Run the method's quantizer, or find what an interrupted run of this job left, and yield a backend and its record.

    Raises EnvironmentMissing when the package fails, Resumable when the child was killed, CheckFailed when it quantized
    other modules than the plan's or changed what the plan keeps.
    """
    plan, listener = job.plan, job.listener
    quantizer = quantizer_of(plan.recipe.method)
    assert quantizer is not None
    device = usable_device(job.device)
    decisions = [d for d in plan.decisions.values() if d.scheme is not None and d.layer_class is not LayerClass.MTP]
    with private_folder(job.key, outside=job.target) as folder:
        if not (folder / "outcome.json").exists():
            _prepare(folder, job, decisions, device)
            listener(Said(f"{quantizer.title} {quantizer.version} runs in a process of its own; log: {folder}/log.txt"))
            _run(folder, quantizer, device, listener)
        outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
        try:
            if "error" in outcome:
                raise EnvironmentMissing(
                    f"{quantizer.title}: {outcome['error']}", hint="use a native method: mse, gptq"
                )
            _require_plan(quantizer, outcome, decisions)
        except SparkquantError:
            (folder / "outcome.json").unlink()  # a later attempt must not find it
            raise
        listener(Said(f"{quantizer.title}: {outcome['seconds']:,} s, peak memory {outcome['peak_rss'] >> 20:,} MiB"))
        yield PreparedBackend(folder), _record(plan, quantizer, outcome, decisions, device)


def require_machine(plan: Plan, *, device: str, max_memory: int | None) -> None:
    """EnvironmentMissing when the method cannot run on this device, UsageError when the whole model does not fit."""
    require_device(plan.decisions.values(), plan.recipe.method, usable_device(device))
    needed, free = plan.footprint.working_bytes, max_memory or available_bytes("cpu")
    if needed > free:
        raise UsageError(
            f"method {plan.recipe.method.name} holds the whole model: it needs {needed / 2**30:.1f} GiB,"
            f" {free / 2**30:.1f} GiB are available",
            hint="method gptq works block by block; `--max-memory` overrules what is counted as available",
        )


def _prepare(folder: Path, job: BackendJob, decisions: Sequence[Decision], device: str) -> None:
    """Write the job; nothing of an earlier attempt stays."""
    for old in [*folder.glob("block-*.pt"), folder / "overlay.pt", folder / "log.txt"]:
        old.unlink(missing_ok=True)
    if job.source.overlay:
        torch.save(dict(job.source.overlay), folder / "overlay.pt")
    method, calibration = job.plan.recipe.method, job.calibration
    fields = {
        "method": method.name,
        "options": method.options,
        "source": str(job.source.checkpoint.path.resolve()),
        "device": device,
        "rows": [] if calibration is None else [list(row) for row in calibration.rows],
        "decisions": [
            {
                "tensor": d.tensor,
                "module": d.module,
                "scale_group": d.scale_group,
                "parts": list(d.parts),
                "experts": d.experts,
                "scheme": d.scheme.as_json() if d.scheme else None,
            }
            for d in decisions
        ],
    }
    (folder / "job.json").write_text(json.dumps(fields), encoding="utf-8")


def _run(folder: Path, quantizer: Quantizer, device: str, listener: Listener) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # the libraries take a GPU where they see one
    command = [sys.executable, *CHILD, str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment, text=True
    ) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith('"'):  # the rest is what a library printed before it was silenced
                    listener(Said(f"{quantizer.title}: {json.loads(line)}"))
            early = child.stderr.read() if child.stderr is not None else ""
            child.wait()
        finally:
            child.kill()
    if (folder / "outcome.json").exists():
        return
    if child.returncode < 0:
        raise Resumable(
            f"{quantizer.title} was killed by signal {-child.returncode}",
            hint="the same command starts it again; signal 9 is mostly a lack of memory",
        )
    lines = (early + _text(folder / "log.txt")).strip().splitlines()
    raise EnvironmentMissing(
        f"{quantizer.title} {quantizer.version} stopped with exit code {child.returncode} and no result",
        hint=f"the whole log is {folder / 'log.txt'}; methods mse and gptq need no other package",
        problems=[Problem("", line[:300]) for line in lines[-LOG_LINES:]],
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def modules_of(decisions: Sequence[Decision]) -> list[str]:
    """The modules that a plan quantizes, every expert by itself."""
    return [
        name
        for d in decisions
        for name in (
            [f"{d.module.rpartition('.')[0]}.{expert}.{part}" for expert in range(d.experts) for part in d.parts]
            if d.parts
            else [d.module]
        )
    ]


def _require_plan(quantizer: Quantizer, outcome: Mapping[str, Any], decisions: Sequence[Decision]) -> None:
    """What was quantized must be the plan, and everything else must be as it was."""
    planned, found = set(modules_of(decisions)), set(outcome["quantized"])
    stored = set(outcome["stored"])
    problems = [Problem(name, "is in the plan and was not quantized") for name in sorted(planned - found)]
    problems += [Problem(name, "was quantized, the plan keeps it") for name in sorted(found - planned)]
    problems += [Problem(name, "was changed, the plan keeps it as it is") for name in outcome["tampered"]]
    wanted = {tensor.name for d in decisions for tensor in d.stored()}
    problems += [Problem(name, "is missing from the result") for name in sorted(wanted - stored)]
    if problems:
        raise CheckFailed(
            f"{quantizer.title} did not do what the plan says ({len(problems)} differences); nothing was written",
            hint="use a native method (mse, gptq), or leave these classes 16-bit",
            problems=problems,
        )


def _record(
    plan: Plan, quantizer: Quantizer, outcome: Mapping[str, Any], decisions: Sequence[Decision], device: str
) -> dict[str, Any]:
    """Who made the codes, and with what: counts and versions, nothing of the rows."""
    beside = [d.module for d in plan.decisions.values() if d.scheme is not None and d.layer_class is LayerClass.MTP]
    return {
        "method": plan.recipe.method.as_json(),
        "package": {"name": quantizer.distribution, "version": quantizer.version},
        "torch": torch.__version__,
        "device": device,
        "modules": len(modules_of(decisions)),
        "native_mse": beside,
        "notes": outcome["notes"],
    }
