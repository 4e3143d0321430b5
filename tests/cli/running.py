"""Two ways to run the command line: in this process for speed, and as a process where streams and signals matter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from sparkquant.cli import app

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "hybrid-5m"
CALL = "from sparkquant.cli import main; main()"


def invoke(*arguments: object) -> Any:
    """Run in this process; `stdout` and `stderr` are apart. Exceptions that are no exit come out."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="sparkquant")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process: this checkout importable, no colours, no hub, one thread for tiny models."""
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(extra or {})}


def command(*arguments: object, flags: tuple[str, ...] = ()) -> list[str]:
    """The argument vector of `sparkquant ...` under this interpreter."""
    return [sys.executable, *flags, "-c", CALL, *map(str, arguments)]


def spawn(*arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Any:
    """Run as a process to its end."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, cwd=cwd, env=environment(env), timeout=120, check=False
    )
