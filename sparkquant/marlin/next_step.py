"""What to do next: commands built from what a log says of its own server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from sparkquant.marlin.server_log import Engine, Fault, ServerLog

ASYNCHRONOUS = "CUDA launches are asynchronous: a trace names where the host next looked, not where it happened"
MISSING_MODULE = "No module named '"


def serve(log: ServerLog, environment: Mapping[str, str] | None = None, **changed: object) -> str:
    """The command that starts this server again, with other variables and options (None drops one)."""
    given = {key: value for key, value in log.arguments.items() if key not in ("model", "model_tag")}
    options = {**given, **changed}
    words = [f"{name}={value}" for name, value in (environment or {}).items()]
    if log.engine is Engine.SGLANG:
        words += ["python", "-m", "sglang.launch_server", "--model-path", log.model or "MODEL"]
    else:
        words += ["vllm", "serve", log.model or "MODEL"]
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [json.dumps(value)] if isinstance(value, dict) else _words(value)
    return shlex.join(words)


def _words(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def after_fault(log: ServerLog, fault: Fault) -> str:
    """The next command after a fault."""
    if fault.id in ("illegal-instruction", "illegal-access", "cuda-error"):
        return serve(log, {"CUDA_LAUNCH_BLOCKING": "1"}, enforce_eager=True)
    if fault.id == "import":
        return _import(log, fault)
    if fault.id == "capture":
        return serve(log, enforce_eager=True)
    if fault.id in ("no-kernel", "parameter", "scheme", "shape", "architecture"):
        return verify(log)
    if fault.id == "backend.absent":
        return serve(log, linear_backend=None)
    if fault.id == "out-of-memory":
        return "free -g; nvidia-smi  # then start again with a smaller --max-model-len or --gpu-memory-utilization"
    if fault.id in ("no-gpu", "no-image"):
        return "sparkquant doctor"
    if fault.id == "option.unknown":
        return "vllm serve --help=all  # then leave out or rename the option"
    if fault.id == "variable.unknown":
        return f"env -u {_variable(fault.text)} " + serve(log)
    if fault.id == "port":
        return serve(log, port=0)
    if fault.id in ("killed", "dead", "crash"):
        return "dmesg | grep -iE 'killed process|oom|segfault'  # then start again and keep the whole log"
    return serve(log)


def _import(log: ServerLog, fault: Fault) -> str:
    name = fault.text.partition(MISSING_MODULE)[2].partition("'")[0].partition(".")[0]
    if name == "flashinfer" and "gdn" in fault.at and not log.arguments.get("gdn_prefill_backend"):
        return serve(log, gdn_prefill_backend="triton")
    return f"python -m pip install {shlex.quote(name)}" if name.isidentifier() else "sparkquant doctor --vllm PATH"


def _variable(text: str) -> str:
    return text.rpartition(": ")[2] or "NAME"


def verify(log: ServerLog) -> str:
    """The static gate, by the rules of the version that the log names."""
    engine = f" --engine vllm=={log.version}" if log.dialect else ""
    return f"sparkquant verify {shlex.quote(log.model or 'MODEL')}{engine}" + (
        f" --capability {log.capability}" if log.capability else ""
    )


def validate(log: ServerLog) -> str:
    """The gate that judges the output too."""
    return f"sparkquant validate {shlex.quote(log.model or 'MODEL')} --url URL --server-log FILE"
