"""How fast `verify` is: `--deep` against a cold read of the same files, `--headers` on the 27B's 1,199 tensors."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.data.published import QWEN3_5_27B, qwen3_5_27b_shapes, write_headers
from tests.verification.headers import write_result

RECIPES = ("qwen-hybrid-w4a16", "qwen-hybrid-nvfp4-fp8")
REPEATS = 3

READ = """
import os, sys, time
started = time.perf_counter()
buffer = bytearray(8 << 20)
for path in sys.argv[1:]:
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    while os.readv(file, [buffer]):
        pass
    os.close(file)
print(time.perf_counter() - started)
"""
"""A plain read, as fast as one thread can ask for it."""

VERIFY = """
import sys, time
import numpy
from sparkquant.verification.gate import verify
started = time.perf_counter()
report = verify(sys.argv[1], level=sys.argv[2])
seconds = time.perf_counter() - started
assert report.ok or sys.argv[3].startswith("source"), [check.id for check in report.failed]
assert "torch" not in sys.modules
print(seconds)
"""


def seconds(code: str, *arguments: str) -> float:
    """What a fresh process says that its work took, imports aside."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return float(done.stdout)


def forget(folder: Path) -> None:
    """Drop the folder's files from the page cache, so that the next read is cold."""
    for path in folder.iterdir():
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)  # only clean pages are dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def deep(folder: Path, kind: str) -> dict[str, Any]:
    """Cold reads and cold `--deep` in turn; medians."""
    shards = sorted(map(str, folder.glob("*.safetensors")))
    size = sum(Path(shard).stat().st_size for shard in shards)
    reads, checks = [], []
    for _ in range(REPEATS):
        forget(folder)
        reads.append(seconds(READ, *shards))
        forget(folder)
        checks.append(seconds(VERIFY, str(folder), "deep", kind))
    read, check = statistics.median(reads), statistics.median(checks)
    return {
        "checkpoint": kind, "gib": round(size / 2**30, 2), "read_s": round(read, 2), "deep_s": round(check, 2),
        "read_mb_s": round(size / 1e6 / read), "deep_mb_s": round(size / 1e6 / check), "share": round(read / check, 2),
    }  # fmt: skip


def run(work: Path) -> dict[str, Any]:
    """All rows, and the time of `--headers`."""
    source = work / "27b-4-layers"
    subprocess.run([sys.executable, "-m", "benchmarks.checkpoint_27b", str(source)], check=True)
    rows = [deep(source, "source")]
    for name in RECIPES:
        out = work / "verified"
        shutil.rmtree(out, ignore_errors=True)
        code = f"import sparkquant; sparkquant.quantize({str(source)!r}, {name!r}, {str(out)!r}, method='rtn')"
        subprocess.run([sys.executable, "-c", code], check=True)
        rows.append(deep(out, name))
        shutil.rmtree(out)
    folder = work / "27b-headers"
    shutil.rmtree(folder, ignore_errors=True)
    original = write_headers(folder / "source", QWEN3_5_27B, qwen3_5_27b_shapes(), shards=18)
    result = write_result(original, RECIPES[1], folder / "result")
    return {"deep": rows, "headers": [headers(original, "source of the 27B"), headers(result, RECIPES[1])]}


def headers(folder: Path, kind: str) -> dict[str, Any]:
    """Medians of `--headers`: the function alone, and the command with the start of Python."""
    command = [sys.executable, "-c", "from sparkquant.cli import main; main()", "verify", str(folder), "--headers"]
    shards = list(folder.glob("*.safetensors"))
    return {
        "checkpoint": kind, "tensors": sum(len(_header(shard)) for shard in shards), "shards": len(shards),
        "verify_s": round(statistics.median(seconds(VERIFY, str(folder), "headers", kind) for _ in range(REPEATS)), 2),
        "command_s": round(statistics.median(_wall(command) for _ in range(REPEATS)), 2),
    }  # fmt: skip


def _wall(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # an unquantized source has findings
    return time.perf_counter() - started


def _header(shard: Path) -> dict[str, Any]:
    with shard.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return dict(header)


def main(work: Path) -> None:
    """Print the table and keep it as JSON."""
    found = run(work)
    (work / "verify_speed.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| checkpoint | GiB | cold read MB/s | cold --deep MB/s | share |", "|---|---|---|---|---|"]
    for row in found["deep"]:
        cells = (row["checkpoint"], row["gib"], row["read_mb_s"], row["deep_mb_s"], f"{row['share']:.0%}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "| checkpoint | tensors | shards | `verify --headers` s | the whole command s |",
        "|---|---|---|---|---|",
    ]
    for row in found["headers"]:
        cells = (row["checkpoint"], f"{row['tensors']:,}", row["shards"], row["verify_s"], row["command_s"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
