"""Run one contestant in a fresh process and read what it cost from the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Wall and CPU seconds, peak resident memory in bytes."""

    wall_s: float
    cpu_s: float
    peak_rss: int


def measure(arguments: list[str], threads: int = 2) -> Cost:
    """Costs of a command; raises when it fails."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "0",
    }
    started = time.perf_counter()
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"{arguments[:3]} failed:\n{output.decode(errors='replace')[-3000:]}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def python(code: str, threads: int = 2) -> Cost:
    """Costs of a Python program."""
    return measure([sys.executable, "-c", code], threads)
