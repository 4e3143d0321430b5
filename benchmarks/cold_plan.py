"""What `sparkquant plan` costs from a cold start on the headers of a 27B, against an import of its libraries alone."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.measuring import Cost, python
from tests.data.published import QWEN3_5_27B, qwen3_5_27b_shapes, write_headers

REPEATS = 7
PLAN = "import sys; sys.argv = ['sparkquant', 'plan', {folder!r}]; from sparkquant.cli import main; main()"
LIBRARIES = "import typer, typer._adapters, pydantic, yaml, rich.console, rich.table"
"""The floor: any command line of these libraries pays for them before its first own line."""


def run(work: Path) -> list[dict[str, Any]]:
    """One row for the interpreter, the libraries and the plan: medians of fresh processes, taken in turn."""
    folder = work / "27b-headers-only" / "Qwen3.5-27B"
    shutil.rmtree(folder, ignore_errors=True)
    write_headers(folder, QWEN3_5_27B, qwen3_5_27b_shapes(), shards=18)
    codes = {
        "python": "pass",
        "python and the libraries": LIBRARIES,
        "sparkquant plan": PLAN.format(folder=str(folder)),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in codes}
    for turn in range(REPEATS + 1):
        for name, code in codes.items():
            cost = python(code, threads=1)
            if turn:  # the first turn fills the file cache and writes the bytecode
                costs[name].append(cost)
    return [
        {
            "what": name,
            "wall_s": round(statistics.median(cost.wall_s for cost in found), 3),
            "cpu_s": round(statistics.median(cost.cpu_s for cost in found), 3),
            "peak_mb": round(max(cost.peak_rss for cost in found) / 1e6),
        }
        for name, found in costs.items()
    ]


def main(work: Path) -> None:
    """Print the table and keep it as JSON."""
    rows = run(work)
    (work / "cold_plan.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = ["| a fresh process | wall s | CPU s | peak MB |", "|---|---|---|---|"]
    lines += [f"| {row['what']} | {row['wall_s']} | {row['cpu_s']} | {row['peak_mb']} |" for row in rows]
    sys.stdout.write("\n".join(lines) + "\n")
