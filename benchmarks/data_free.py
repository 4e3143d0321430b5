"""Data-free quantization of 27B-shaped layers: this library, llm-compressor's model_free_ptq, and `cp`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measuring import Cost, measure, python

CLASSES = (
    "attention.qkv", "attention.out", "linear_attention.qkvz", "linear_attention.out", "mlp.gate_up", "mlp.down",
)  # fmt: skip
SCHEMES = {"w4a16": "W4A16", "nvfp4a16": "NVFP4A16", "fp8": "FP8_DYNAMIC"}

OURS = """
import sys
import sparkquant
sparkquant.quantize({source!r}, {recipe!r}, {out!r}, method={method!r})
"""

IMPORTS = "import sparkquant; sparkquant.quantize; import sparkquant.numerics.arrays"

PEER = """
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from llmcompressor import model_free_ptq
import torch
torch.set_num_threads(2)
targets = [r"re:.*mlp\\.(gate|up|down)_proj$", r"re:.*self_attn\\.(q|k|v|o)_proj$",
           r"re:.*linear_attn\\.(in_proj_qkv|in_proj_z|out_proj)$"]
ignore = [r"re:.*in_proj_[ab]$", r"re:.*conv1d$", r"re:.*lm_head$", r"re:.*embed_tokens$", r"re:.*norm$"]
config = QuantizationConfig(config_groups={{"g": preset_name_to_scheme({preset!r}, targets)}}, ignore=ignore)
model_free_ptq({source!r}, {out!r}, config=config, device="cpu", max_workers=2)
"""


def recipe(scheme: str) -> dict[str, Any]:
    """One scheme on every decoder Linear."""
    return {
        "name": f"bench-{scheme}",
        "summary": "one scheme on every decoder Linear",
        "families": ["qwen3_5"],
        "schemes": dict.fromkeys(CLASSES, scheme),
    }


ERROR = """
from sparkquant.checkpoint import Checkpoint
from sparkquant.weights import StoredWeights
names = ["model.language_model.layers.0.linear_attn.in_proj_z.weight",
         "model.language_model.layers.3.self_attn.q_proj.weight",
         "model.language_model.layers.3.mlp.down_proj.weight"]
wrong = whole = 0.0
source, result = Checkpoint.open({source!r}), Checkpoint.open({out!r}, strict=False)
with StoredWeights(source) as before, StoredWeights(result) as after:
    for name in names:
        a, b = before.read(name).float(), after.read(name).float()
        wrong += float((a - b).square().sum())
        whole += float(a.square().sum())
print((wrong / whole) ** 0.5)
"""


def weight_error(source: Path, out: Path) -> float:
    """Relative error of the dequantized weights of three matrices.

    In a process of its own: a child starts with the peak memory of its parent, which would spoil what is measured next.
    """
    code = ERROR.format(source=str(source), out=str(out))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _fresh(out: Path) -> str:
    for folder in (out, out.with_name(out.name + ".partial")):
        shutil.rmtree(folder, ignore_errors=True)
    return str(out)


def _row(name: str, scheme: str, cost: Cost, size: int, error: float | None, baseline: int) -> dict[str, Any]:
    return {
        "contestant": name,
        "scheme": scheme,
        "wall_s": round(cost.wall_s, 2),
        "cpu_s": round(cost.cpu_s, 2),
        "mb_per_s": round(size / 1e6 / cost.wall_s, 1),
        "peak_rss_mib": round(cost.peak_rss / 2**20),
        "above_imports_mib": round((cost.peak_rss - baseline) / 2**20) if baseline else None,
        "weight_error": round(error, 5) if error is not None else None,
    }


def run(work: Path, *, repeats: int = 2) -> list[dict[str, Any]]:
    """All contestants; each time is the best of `repeats` after one run that warms file cache and compiled kernels."""
    source = work / "27b-4-layers"
    subprocess.run([sys.executable, "-m", "benchmarks.checkpoint_27b", str(source)], check=True)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    out = work / "out"
    imports = python(IMPORTS).peak_rss
    rows = []
    copies = [measure(["cp", "-r", str(source), _fresh(out)]) for _ in range(repeats)]
    rows.append(_row("cp (warm)", "-", min(copies, key=lambda c: c.wall_s), size, None, 0))
    for scheme, preset in SCHEMES.items():
        for method in ("rtn", "mse"):
            code = {"source": str(source), "recipe": recipe(scheme), "method": method}
            runs = [python(OURS.format(out=_fresh(out), **code)) for _ in range(repeats + 1)]
            best = min(runs[1:], key=lambda c: c.wall_s)
            rows.append(_row(f"sparkquant {method}", scheme, best, size, weight_error(source, out), imports))
        peer = python(PEER.format(source=str(source), out=_fresh(out), preset=preset))
        rows.append(_row("llm-compressor model_free_ptq", scheme, peer, size, weight_error(source, out), 0))
    _fresh(out)
    return rows


def main(work: Path) -> None:
    """Print the table and keep it as JSON."""
    rows = run(work)
    (work / "data_free.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, with the ratio to the peer of the same scheme."""
    peers = {row["scheme"]: row["wall_s"] for row in rows if "model_free" in row["contestant"]}
    lines = [
        "| contestant | scheme | wall s | CPU s | MB/s of source | x peer | RSS MiB | above imports | weight error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peer = peers.get(row["scheme"])
        ratio = f"{peer / row['wall_s']:.1f}" if peer else ""
        cells = (
            row["contestant"], row["scheme"], row["wall_s"], row["cpu_s"], row["mb_per_s"], ratio, row["peak_rss_mib"],
            row["above_imports_mib"] if row["above_imports_mib"] is not None else "", row["weight_error"] or "",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
