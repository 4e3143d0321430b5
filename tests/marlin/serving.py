"""What the tests of the gate share: a small result and its source, the fake engine, and processes by their mark."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FAKE = Path(__file__).with_name("fake_vllm.py")
VLLM = f"{sys.executable} {FAKE}"
SOURCE = Path(__file__).resolve().parents[2] / "examples" / "hybrid-5m"
MARK = "SPARKQUANT_TEST_MARK"


@contextmanager
def variables(**given: str) -> Iterator[None]:
    """Environment variables for a while: servers inherit them."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def gate(out: Path, logs: Path, fault: str = "", **options: Any) -> Any:
    """A validate run on the fake engine, small and on an imagined GB10."""
    from sparkquant.marlin.validate import validate

    given: Mapping[str, Any] = {
        "reference": SOURCE, "vllm": VLLM, "capability": "12.1", "rows": 2, "max_tokens": 64, "parallel": 4,
        "logs": logs, "start_limit": 60.0, **options,
    }  # fmt: skip
    with variables(FAKE_FAULT=fault):
        return validate(out, **given)


def rows_of_ids(folder: Path, count: int = 8) -> Path:
    """Data for which no tokenizer is loaded: distinct rows of token ids."""
    path = folder / "rows.json"
    path.write_text(json.dumps([[(17 * i + j) % 2000 for j in range(40)] for i in range(count)]))
    return path


def marked(mark: str) -> list[int]:
    """Processes that inherited a mark, this one aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def in_group(group: int) -> list[int]:
    """Processes of a process group that still run; what has ended and waits for its parent does not."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z" and int(fields[2]) == group:
                found.append(int(entry.name))
    return found


def until(condition: Any, seconds: float = 30.0) -> bool:
    """Wait for it; whether it came true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())
