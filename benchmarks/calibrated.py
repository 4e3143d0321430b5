"""Calibrated quantization: this library and llm-compressor's GPTQ on the same rows, judged by KL on held-out rows.

With the trained 32M hybrid beside the checkout (`../shared/models/hybrid-32m`) on its own rows; without it on
`examples/hybrid-5m` with the `coding-agent` mix and bundled evaluation rows. One thread and one dtype for everybody:
float32 where the processor has no bfloat16, which the peer would otherwise emulate, eight times slower.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data_free import CLASSES
from benchmarks.measuring import Cost, python
from sparkquant.device import compute_dtype

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
ROW_TOKENS, HELD_OUT_ROWS = 512, 24

HEAD = "import torch; torch.set_num_threads(1)\n"

OURS = HEAD + "import sparkquant\nsparkquant.quantize({source!r}, {recipe!r}, {out!r}, calibration={rows!r})\n"

IMPORTS = {
    "sparkquant": HEAD + "import sparkquant.calibrated, numba, transformers.models.qwen3_5.modeling_qwen3_5",
    "llm-compressor": HEAD + "import llmcompressor.modifiers.gptq, transformers.models.qwen3_5.modeling_qwen3_5",
}

PEER = (
    HEAD
    + """
import json, transformers
from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch.utils.data import DataLoader
names = json.load(open({source!r} + "/config.json"))["architectures"]
model = getattr(transformers, names[0]).from_pretrained({source!r}, dtype=torch.{dtype})
targets = [r"re:.*layers\\.\\d+\\.mlp\\.(gate|up|down)_proj$", r"re:.*self_attn\\.(q|k|v|o)_proj$",
           r"re:.*linear_attn\\.(in_proj_qkv|in_proj_z|out_proj)$"]
ignore = [r"re:.*in_proj_[ab]$", r"re:.*conv1d$", "lm_head", r"re:.*visual.*", r"re:.*mtp.*"]
groups = {{"g": preset_name_to_scheme({preset!r}, targets)}}
modifier = {modifier}
rows = [{{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.int64)}}
        for row in json.load(open({rows!r}))]
tokenizer = transformers.AutoTokenizer.from_pretrained({source!r})
oneshot(model=model, recipe=[modifier], processor=tokenizer, pipeline={pipeline!r},
        dataset=DataLoader(rows, batch_size=None))
model.save_pretrained({out!r})
tokenizer.save_pretrained({out!r})
"""
)

GPTQ = 'GPTQModifier(config_groups=groups, ignore=ignore, actorder="static")'

EVALUATE = (
    HEAD
    + """
import json, sparkquant
options = json.loads({options!r})
found = sparkquant.evaluate({out!r}, source={source!r}, **options)
json.dump(found.as_json(), open({record!r}, "w"))
"""
)


@dataclass(frozen=True)
class Material:
    """What everybody works on: a checkpoint, calibration rows (ids), and the options of `evaluate`."""

    source: Path
    rows: Path
    evaluation: dict[str, Any]
    told: str


def material(work: Path) -> Material:
    """The 32M hybrid and its rows, or what ships with the project."""
    source = SHARED / "models" / "hybrid-32m"
    if source.is_dir():
        held = json.loads((SHARED / "eval" / "heldout-hybrid-32m.json").read_text())
        chosen = [row[:ROW_TOKENS] for row in held if len(row) >= ROW_TOKENS][:HELD_OUT_ROWS]
        data = work / "held-out.json"
        data.write_text(json.dumps(chosen))
        rows = SHARED / "eval" / "calibration-hybrid-32m.json"
        tasks = str(SHARED / "eval" / "signature-recall.jsonl")
        return Material(source, rows, {"data": str(data), "tasks": tasks}, "hybrid-32m, its own rows")
    source = ROOT / "examples" / "hybrid-5m"
    return Material(source, mix_rows(source, work), {}, "hybrid-5m, the coding-agent mix")


def mix_rows(source: Path, work: Path) -> Path:
    """The rows that the coding-agent mix gives for this checkpoint, as ids that every contestant can read."""
    from sparkquant.calibration.loading import load_calibration
    from sparkquant.checkpoint import Checkpoint

    calibration = load_calibration("coding-agent", Checkpoint.open(source), rows=128, tokens=ROW_TOKENS)
    path = work / "mix-rows.json"
    path.write_text(json.dumps(calibration.rows))
    return path


def recipe(scheme: str, method: dict[str, Any]) -> dict[str, Any]:
    """One scheme on every decoder Linear."""
    return {
        "name": f"bench-{scheme}",
        "summary": "one scheme on every decoder Linear",
        "families": ["qwen3_5"],
        "schemes": dict.fromkeys(CLASSES, scheme),
        "method": method,
    }


def mixed(head: str, method: dict[str, Any]) -> dict[str, Any]:
    """NVFP4 on the MLP, FP8 on attention and delta net, and a scheme for lm_head."""
    schemes = {name: "nvfp4a16" if name.startswith("mlp") else "fp8" for name in CLASSES}
    return recipe("mixed", method) | {"schemes": schemes | {"lm_head": head}}


DEFAULT: dict[str, Any] = {"name": "gptq"}
TWO_STREAMS: dict[str, Any] = {"name": "gptq", "correction": 0.5}


def contestants(found: Material, out: Path, own: Path | None) -> list[tuple[str, str, str]]:
    """(contestant, scheme, program)."""
    base = {"source": str(found.source), "out": str(out), "rows": str(found.rows)}

    def ours(recipe: dict[str, Any], **changed: str) -> str:
        return OURS.format(recipe=recipe, **(base | changed))

    def peer(preset: str) -> str:
        dtype = str(compute_dtype("cpu")).removeprefix("torch.")
        return PEER.format(preset=preset, modifier=GPTQ, pipeline="sequential", dtype=dtype, **base)

    listed = [
        ("llm-compressor GPTQ", "int4", peer("W4A16")),
        ("sparkquant gptq", "int4", ours(recipe("w4a16", DEFAULT))),
        ("sparkquant gptq, two streams", "int4", ours(recipe("w4a16", TWO_STREAMS))),
        ("llm-compressor GPTQ", "NVFP4", peer("NVFP4A16")),
        ("sparkquant gptq", "NVFP4", ours(recipe("nvfp4a16", DEFAULT))),
        ("sparkquant gptq", "mixed, NVFP4 head", ours(mixed("nvfp4a16", DEFAULT))),
        ("sparkquant gptq", "mixed, int8 head", ours(mixed("w8a16", DEFAULT))),
    ]
    if own is not None:
        listed.append(("sparkquant gptq, coding-agent mix", "int4", ours(recipe("w4a16", DEFAULT), rows=str(own))))
    return listed


def run(work: Path) -> list[dict[str, Any]]:
    """Every contestant in a process of its own, then its evaluation in another."""
    found = material(work)
    print(f"calibrated: {found.told}", flush=True)
    own = mix_rows(found.source, work) if found.source.name != "hybrid-5m" else None
    warm_up(found, work)
    imports = {name: python(code, threads=1) for name, code in IMPORTS.items()}
    rows = []
    for number, (name, scheme, program) in enumerate(contestants(found, work / "calibrated", own)):
        _fresh(work / "calibrated")
        cost = python(program, threads=1)
        record = work / f"calibrated-{number}.json"
        options = json.dumps(found.evaluation)
        code = EVALUATE.format(
            out=str(work / "calibrated"), source=str(found.source), options=options, record=str(record)
        )
        python(code, threads=2)
        rows.append(_row(name, scheme, cost, imports[name.split()[0]], json.loads(record.read_text())))
        print(_line(rows[-1], rows), flush=True)
    _fresh(work / "calibrated")
    return rows


def warm_up(found: Material, work: Path) -> None:
    """Compile the kernels once, outside of every time."""
    small = str(ROOT / "examples" / "hybrid-5m")
    options = {"recipe": recipe("w4a16", DEFAULT), "out": _fresh(work / "warm"), "rows": str(_few(found, work))}
    python(OURS.format(source=small, **options), threads=1)
    _fresh(work / "warm")


def _few(found: Material, work: Path) -> Path:
    """Ids that the small model knows."""
    path = work / "warm-rows.json"
    path.write_text(json.dumps([[i % 256 for i in row[:128]] for row in json.loads(found.rows.read_text())[:8]]))
    return path


def _fresh(out: Path) -> str:
    for folder in (out, out.with_name(out.name + ".partial")):
        shutil.rmtree(folder, ignore_errors=True)
    return str(out)


def _row(name: str, scheme: str, cost: Cost, imports: Cost, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "contestant": name,
        "scheme": scheme,
        "wall_s": round(cost.wall_s, 1),
        "cpu_s": round(cost.cpu_s, 1),
        "above_imports_mib": round((cost.peak_rss - imports.peak_rss) / 2**20),
        "kl_mean": found["kl_mean"],
        "kl_rows": found["kl_rows"],
        "kl_p99": found["kl_p99"],
        "top1": found["top1"],
        "recall": found["recall"],
        "acceptance": found["acceptance"],
    }


HEADINGS = (
    "| contestant | scheme | wall s | CPU s | MiB above imports | mean KL | KL less than peer, paired | top-1 % "
    "| recall (source) | draft 1 accepted % (source) |\n|---|---|---|---|---|---|---|---|---|---|"
)


def _line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    peer = next((r for r in rows if r["scheme"] == row["scheme"] and r["contestant"].startswith("llm")), None)
    cells = [
        row["contestant"], row["scheme"], row["wall_s"], row["cpu_s"], row["above_imports_mib"],
        f"{row['kl_mean']:.5f}", _paired(row, peer) if peer and peer is not row else "", f"{100 * row['top1']:.2f}",
        f"{row['recall'].get('result', '')} ({row['recall'].get('source', '')})", _drafts(row["acceptance"]),
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _paired(row: dict[str, Any], peer: dict[str, Any]) -> str:
    differences = [a - b for a, b in zip(peer["kl_rows"], row["kl_rows"], strict=True)]
    mean = sum(differences) / len(differences)
    spread = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1) / len(differences)
    return f"{mean:.5f} +- {spread**0.5:.5f}"


def _drafts(acceptance: dict[str, Any]) -> str:
    return ", ".join(
        f"{kind} {100 * sides['result'][0]:.1f} ({100 * sides['source'][0]:.1f})"
        for kind, sides in acceptance.items()
        if sides.get("result") and sides.get("source")
    )


def main(work: Path) -> None:
    """Print the table as it grows and keep it as JSON."""
    print(HEADINGS, flush=True)
    (work / "calibrated.json").write_text(json.dumps(run(work), indent=1) + "\n")
