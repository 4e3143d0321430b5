"""Every backend and the native methods on the trained 32M hybrid beside the checkout: quality, bytes, time and memory.

The same plan, the same calibration rows (128 x 512 ids), one writer: what differs is who chose the numbers. Each case
runs in a process of its own, and so does its evaluation; one thread for everybody. A package that is not installed is
said and left out. Without `../shared` there is nothing to measure on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.calibrated import EVALUATE, HEAD, Material, _drafts, _fresh, material, mixed, recipe
from benchmarks.data_free import CLASSES
from benchmarks.measuring import python

OURS = (
    HEAD
    + """
import sparkquant
sparkquant.quantize({source!r}, {recipe!r}, {out!r}, calibration={rows!r})
"""
)


def mlp(method: dict[str, Any]) -> dict[str, Any]:
    """NVFP4 on the MLP alone."""
    schemes = {name: "nvfp4a16" for name in CLASSES if name.startswith("mlp")}
    return recipe("mlp", method) | {"schemes": schemes}


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """(what is stored, who chose the numbers, recipe)."""
    int4: list[dict[str, Any]] = [
        {"name": "rtn"}, {"name": "mse"}, {"name": "imatrix"}, {"name": "gptq"},
        {"name": "llmcompressor", "modifier": "imatrix"}, {"name": "llmcompressor", "modifier": "gptq"},
        {"name": "autoround", "iters": 0}, {"name": "autoround", "iters": 200},
    ]  # fmt: skip
    floats: list[dict[str, Any]] = [
        {"name": "rtn"}, {"name": "mse"}, {"name": "gptq"}, {"name": "modelopt", "algorithm": "max"},
        {"name": "llmcompressor", "modifier": "gptq"},
    ]  # fmt: skip
    listed = [("int4", recipe("w4a16", method)) for method in int4]
    listed += [("NVFP4, FP8", mixed("nvfp4a16", method)) for method in floats]
    listed += [("NVFP4 MLP", mlp(method)) for method in floats if method["name"] != "gptq"]
    return [(stored, _who(made["method"]), made) for stored, made in listed]


def _who(method: dict[str, Any]) -> str:
    return " ".join(str(value) if key in ("name", "modifier", "algorithm") else f"{key} {value}"
                    for key, value in method.items())  # fmt: skip


def run(work: Path) -> list[dict[str, Any]]:
    """Every case whose package is there, one after the other."""
    from sparkquant.errors import EnvironmentMissing
    from sparkquant.quantizers import QUANTIZERS

    found = material(work)
    if found.source.name != "hybrid-32m":
        print("skipped: there is no ../shared/models/hybrid-32m beside this checkout", flush=True)
        return []
    out = work / "backends"
    rows: list[dict[str, Any]] = []
    print(HEADINGS, flush=True)
    for number, (stored, who, made) in enumerate(cases()):
        quantizer = QUANTIZERS.get(made["method"]["name"])
        try:
            if quantizer is not None:
                quantizer.require()
        except EnvironmentMissing as missing:
            print(f"skipped {who}: {missing.what}; {missing.hint}", flush=True)
            continue
        rows.append(_measured(found, stored, who, made, out, work / f"backends-{number}.json"))
        print(_line(rows[-1]), flush=True)
    _fresh(out)
    return rows


def _measured(found: Material, stored: str, who: str, made: dict[str, Any], out: Path, record: Path) -> dict[str, Any]:
    calibrated = made["method"]["name"] not in ("rtn", "mse", "modelopt")
    options = {"source": str(found.source), "out": _fresh(out)}
    cost = python(OURS.format(recipe=made, rows=str(found.rows) if calibrated else None, **options), threads=1)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    options |= {"out": str(out), "options": json.dumps(found.evaluation), "record": str(record)}
    python(EVALUATE.format(**options), threads=1)
    result = json.loads(record.read_text())
    kept = {key: result[key] for key in ("kl_mean", "kl_p99", "kl_rows", "top1", "recall", "acceptance")}
    costs = {"wall_s": round(cost.wall_s, 1), "peak_rss_mib": round(cost.peak_rss / 2**20)}
    return {"stored": stored, "who": who, "bytes": size, **costs, **kept}


HEADINGS = (
    "| stored | method | mean KL | 99th percentile | top-1 % | recall (source) | draft 1 accepted % (source) | bytes |"
    " wall s | peak MiB |\n|---|---|---|---|---|---|---|---|---|---|"
)


def _line(row: dict[str, Any]) -> str:
    cells = [
        row["stored"], row["who"], f"{row['kl_mean']:.5f}", f"{row['kl_p99']:.4f}", f"{100 * row['top1']:.2f}",
        f"{row['recall'].get('result', '')} ({row['recall'].get('source', '')})", _drafts(row["acceptance"]),
        f"{row['bytes']:,}", row["wall_s"], row["peak_rss_mib"],
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main(work: Path) -> None:
    """Print the table as it grows and keep it as JSON."""
    rows = run(work)
    if rows:
        (work / "backends.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
