"""`Machine`: the GPUs, the driver and the memory of this computer, as far as each can be known."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkquant.marlin.noun import Noun

TIME_LIMIT = 30
"""Seconds for the driver or nvidia-smi to answer."""
NVIDIA_SMI = ("--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits")
SYSTEM_ON_CHIP = ("8.7", "11.0", "12.1")
"""Capabilities of chips that share one memory with the processor: Orin, Thor, GB10."""


class Gpu(Noun):
    """One device. `memory_bytes` is None where nothing tells (nvidia-smi on GB10); `unified`: shared with the host."""

    name: str
    capability: str
    memory_bytes: int | None
    unified: bool


class Machine(Noun):
    """`notes` say what could not be known and why; `driver` is its version, `cuda` the newest CUDA that it runs."""

    architecture: str
    gpus: tuple[Gpu, ...]
    driver: str
    cuda: str
    memory_bytes: int | None
    available_bytes: int | None
    swap_bytes: int | None
    variables: dict[str, str]
    notes: tuple[str, ...]


def look() -> Machine:
    """This machine, without creating a CUDA context. Never fails: what cannot be known is in `notes`."""
    notes: list[str] = []
    told = _probe(notes)
    rows = _smi(notes)
    gpus = tuple(_gpus(told, rows))
    if not gpus:
        notes.append("no NVIDIA GPU was found: kernels are judged for a capability that you name")
    memory = _meminfo()
    if any(gpu.unified for gpu in gpus):
        notes.append("GPU and processor share one memory: weights, KV cache and page cache compete for it")
    return Machine(
        architecture=platform.machine(), gpus=gpus, driver=_driver(rows), cuda=told.get("driver_cuda", ""),
        memory_bytes=memory.get("MemTotal"), available_bytes=memory.get("MemAvailable"),
        swap_bytes=memory.get("SwapTotal"), variables=dict(_variables()), notes=tuple(notes),
    )  # fmt: skip


def _probe(notes: list[str]) -> dict[str, Any]:
    """The driver's own answer, in a process of its own."""
    command = [sys.executable, "-m", "sparkquant.marlin.cuda_probe"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    answer = _run(command, {**os.environ, "PYTHONPATH": path})
    try:
        told = json.loads(answer or "")
    except ValueError:
        told = {"error": "the CUDA driver crashed or hung when it was asked"}
    if "error" in told:
        notes.append(told["error"])
    return told if isinstance(told, dict) else {}


def _run(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    """Standard output, None where it cannot run, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIME_LIMIT, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _smi(notes: list[str]) -> list[list[str]]:
    """Rows of nvidia-smi: name, capability, MiB or [N/A], driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    answer = _run([program, *NVIDIA_SMI])
    if answer is None:
        notes.append("nvidia-smi is installed and does not answer")
    rows = [[field.strip() for field in line.split(",")] for line in (answer or "").splitlines()]
    return [row for row in rows if len(row) == 4]


def _gpus(told: dict[str, Any], rows: list[list[str]]) -> Iterator[Gpu]:
    """By the driver; by nvidia-smi where the driver did not answer."""
    for device in told.get("devices", ()):
        unified = bool(device["integrated"]) or device["capability"] in SYSTEM_ON_CHIP
        yield Gpu(
            name=device["name"], capability=device["capability"], memory_bytes=device["memory_bytes"], unified=unified
        )
    if told.get("devices"):
        return
    for name, capability, memory, _ in rows:
        if re.fullmatch(r"\d{1,2}\.\d", capability):
            size = int(memory) * 2**20 if memory.isdecimal() else None
            yield Gpu(name=name, capability=capability, memory_bytes=size, unified=capability in SYSTEM_ON_CHIP)


def _driver(rows: list[list[str]]) -> str:
    if rows:
        return rows[0][3]
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"Kernel Module.{0,80}?(\d{3}\.\d{1,4}(?:\.\d{1,4})?)", text)
    return found[1] if found else ""


def _meminfo() -> dict[str, int]:
    """Bytes by name; empty where /proc is not there."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in pairs if len(parts) == 3 and parts[1].isdecimal()}


PREFIXES = ("VLLM_", "CUDA_", "SGLANG_", "NCCL_", "TORCH_CUDA", "PYTORCH_", "FLASHINFER_")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def _variables() -> Iterator[tuple[str, str]]:
    """Variables that engines read; the values of secrets are left out."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES):
            yield name, "***" if SECRET.search(name) else value
