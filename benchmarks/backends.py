"""Every backend and the native methods on the trained 32M hybrid beside the checkout: quality, bytes, time and memory.

The same plan, the same calibration rows (128 x 512 ids), one writer: what differs is who chose the numbers. Each case
runs in a process of its own, and so does its evaluation; one thread for everybody. A package that is not installed is
said and left out. Without `../shared` there is nothing to measure on.

Every measured case is kept in `backends/` at once, and a later run takes it from there: a run that was cut goes on, and
`--work` elsewhere measures anew. What takes longest comes last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.calibrated import EVALUATE, OURS, Material, _drafts, _fresh, material, mixed, recipe, warm_up
from benchmarks.data_free import CLASSES
from benchmarks.measuring import python
from sparkquant.errors import EnvironmentMissing
from sparkquant.methods import Method
from sparkquant.quantizers import QUANTIZERS


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
    listed.sort(key=lambda case: case[1]["method"].get("iters", 0))
    return [(stored, _who(made["method"]), made) for stored, made in listed]


def _who(method: dict[str, Any]) -> str:
    return " ".join(str(value) if key in ("name", "modifier", "algorithm") else f"{key} {value}"
                    for key, value in method.items())  # fmt: skip


def run(work: Path) -> list[dict[str, Any]]:
    """Every case whose package is there, one after the other."""
    found = material(work)
    if found.source.name != "hybrid-32m":
        print("skipped: there is no ../shared/models/hybrid-32m beside this checkout", flush=True)
        return []
    folder = work / "backends"
    folder.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = []
    warm = False
    print(HEADINGS, flush=True)
    for stored, who, made in cases():
        if missing := _missing(made["method"]):
            print(f"skipped {who}: {missing}", flush=True)
            continue
        kept = folder / (f"{stored} {who}".replace(", ", "-").replace(" ", "-").lower() + ".json")
        row = json.loads(kept.read_text()) if kept.exists() else {}
        if row.get("recipe") != made:
            if not warm:
                warm_up(found, work)
                warm = True
            row = {"recipe": made, **_measured(found, stored, who, made, work / "backends-out")}
            kept.write_text(json.dumps(row, indent=1) + "\n")
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _missing(method: dict[str, Any]) -> str:
    """What must be installed first; "" when nothing is."""
    quantizer = QUANTIZERS.get(method["name"])
    try:
        if quantizer is not None:
            quantizer.require()
    except EnvironmentMissing as missing:
        return f"{missing.what}; {missing.hint}"
    return ""


def _measured(found: Material, stored: str, who: str, made: dict[str, Any], out: Path) -> dict[str, Any]:
    rows = str(found.rows) if Method(**made["method"]).calibrated else None
    record = out.with_suffix(".json")
    options = {"source": str(found.source), "out": _fresh(out)}
    cost = python(OURS.format(recipe=made, rows=rows, **options), threads=1)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    options |= {"options": json.dumps(found.evaluation), "record": str(record)}
    python(EVALUATE.format(**options), threads=1)
    result = json.loads(record.read_text())
    _fresh(out)
    record.unlink()
    kept = {key: result[key] for key in ("kl_mean", "kl_p99", "kl_rows", "top1", "recall", "acceptance")}
    costs = {
        "wall_s": round(cost.wall_s, 1),
        "cpu_s": round(cost.cpu_s, 1),
        "peak_rss_mib": round(cost.peak_rss / 2**20),
    }
    return {"stored": stored, "who": who, "bytes": size, **costs, **kept}


HEADINGS = (
    "| stored | method | mean KL | 99th percentile | top-1 % | recall (source) | draft 1 accepted % (source) | bytes |"
    " wall s | CPU s | peak MiB |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def _line(row: dict[str, Any]) -> str:
    cells = [
        row["stored"], row["who"], f"{row['kl_mean']:.5f}", f"{row['kl_p99']:.4f}", f"{100 * row['top1']:.2f}",
        f"{row['recall'].get('result', '')} ({row['recall'].get('source', '')})", _drafts(row["acceptance"]),
        f"{row['bytes']:,}", row["wall_s"], row["cpu_s"], row["peak_rss_mib"],
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main(work: Path) -> None:
    """Print the table as it grows."""
    run(work)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
