"""Every backend on real checkpoints: the plan's modules, the source's bytes everywhere else, the same verify."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sparkquant
from sparkquant.checkpoint import Checkpoint
from sparkquant.formats import stored_modules
from tests.backends.packages import case, needs, quantized
from tests.checkpoints import read_raw
from tests.cli.running import DEMO, spawn
from tests.execution.folders import digests

Checkpoints = Callable[..., Path]
AUTOROUND = {"name": "autoround", "iters": 1}
IMATRIX = {"name": "llmcompressor", "modifier": "imatrix"}
MODELOPT_MSE = {"name": "modelopt", "algorithm": "mse"}
NVFP4 = "qwen-hybrid-nvfp4-fp8"


def is_as_planned(made: sparkquant.Quantized, source: Path) -> None:
    """Kept tensors byte for byte, quantized modules those of the plan, and every check down to each value."""
    before, after = read_raw(source), read_raw(made.out)
    kept = [name for name, d in made.plan.decisions.items() if d.scheme is None]
    assert all(before[name] == after[name] for name in kept)
    assert any(name.startswith("mtp.") for name in kept)
    stored = {name for name, module in stored_modules(Checkpoint.open(made.out)).items() if module.is_quantized}
    planned = {t.name.rpartition(".")[0] for d in made.plan.decisions.values() if d.scheme for t in d.stored()}
    assert stored == planned
    report = sparkquant.verify(made.out, source=source, level="deep")
    assert report.ok, [(check.id, check.message) for check in report.failed]
    config = json.loads((made.out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize(
    ("kind", "options", "recipe", "method"),
    [
        case("qwen3_5", {"float32_state": True}, NVFP4, "llmcompressor", method="llmcompressor", id="gptq"),
        case("qwen3_5_moe", {}, NVFP4, "llmcompressor", method="llmcompressor", id="gptq, fused experts"),
        case("qwen3_next", {}, "qwen-hybrid-w4a16-fp8", IMATRIX, method="llmcompressor", id="imatrix, experts"),
        case("qwen3_5", {"tied": True}, "qwen-hybrid-fp8", "llmcompressor", method="llmcompressor", id="block fp8"),
        case("qwen3_5", {"float32_state": True}, "qwen-hybrid-w4a16", AUTOROUND, method="autoround", id="autoround"),
        case("qwen3_5_moe", {}, "qwen-hybrid-w4a16", AUTOROUND, method="autoround", id="autoround, fused experts"),
        case("qwen3_next", {}, "qwen-hybrid-w4a16", AUTOROUND, method="autoround", id="autoround, experts"),
        case("qwen3_5", {"float32_state": True}, NVFP4, "modelopt", method="modelopt", id="modelopt"),
        case("qwen3_5_moe", {}, NVFP4, "modelopt", method="modelopt", id="modelopt, fused experts"),
        case("qwen3_next", {}, "qwen-hybrid-fp8", MODELOPT_MSE, method="modelopt", id="modelopt, mse"),
    ],
)
def test_a_result_is_the_plan(
    kind: str, options: dict[str, Any], recipe: str, method: Any, checkpoints: Checkpoints, rows: Path, tmp_path: Path
) -> None:
    source = checkpoints(kind, **options)
    data = None if "modelopt" in str(method) else rows
    is_as_planned(quantized(source, tmp_path / "out", recipe, method, data), source)


SCHEMES: list[dict[str, Any]] = [
    {"scheme": "w4a16", "group_size": 32},
    {"scheme": "w4a16", "group_size": -1},
    {"scheme": "w4a16", "group_size": 64, "symmetric": False},
    {"scheme": "w8a16"},
]
CLASSES = ("attention.qkv", "attention.out", "linear_attention.qkvz", "linear_attention.out", "mlp.gate_up", "mlp.down")


@pytest.mark.parametrize("method", [
    case(AUTOROUND, method="autoround", id="autoround"),
    case("llmcompressor", method="llmcompressor", id="llmcompressor"),
])  # fmt: skip
def test_every_kind_of_integer_is_stored_as_it_was_chosen(
    method: Any, checkpoints: Checkpoints, rows: Path, tmp_path: Path
) -> None:
    """One recipe with all of them: two classes each; lm_head as well."""
    source = checkpoints("qwen3_5")
    schemes = {name: SCHEMES[(index // 2) % 4] for index, name in enumerate(CLASSES)}
    schemes |= {"lm_head": SCHEMES[3]}
    recipe = {"name": "mixed", "summary": "integers of all kinds", "families": ["qwen3_5"], "schemes": schemes}
    is_as_planned(quantized(source, tmp_path / "out", recipe, method, rows), source)


@needs("modelopt")
@pytest.mark.slow
def test_a_draft_head_that_no_model_has_is_quantized_natively_and_said(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoints("qwen3_5")
    made = quantized(source, tmp_path / "out", "qwen-hybrid-fp8-mtp", "modelopt", None)
    is_as_planned_but_the_draft_head(made, source)
    record = json.loads((made.out / "sparkquant" / "backend.json").read_text())
    assert record["package"] == {"name": "nvidia-modelopt", "version": "0.47.0"}
    assert len(record["native_mse"]) == 7
    assert all(name.startswith("mtp.layers.0.") for name in record["native_mse"])


def is_as_planned_but_the_draft_head(made: sparkquant.Quantized, source: Path) -> None:
    report = sparkquant.verify(made.out, source=source, level="deep")
    assert report.ok, [(check.id, check.message) for check in report.failed]


@pytest.mark.parametrize(("method", "recipe"), [
    case("llmcompressor", "qwen-hybrid-w4a16", method="llmcompressor", id="llmcompressor"),
    case(AUTOROUND, "qwen-hybrid-w4a16", method="autoround", id="autoround"),
])  # fmt: skip
def test_the_same_rows_give_the_same_bytes_and_nothing_private_stays(
    method: Any, recipe: str, rows: Path, tmp_path: Path
) -> None:
    first = quantized(DEMO, tmp_path / "a", recipe, method, rows).out
    assert digests(first) == digests(quantized(DEMO, tmp_path / "b", recipe, method, rows).out)
    assert not list((tmp_path / "cache" / "sparkquant").iterdir())
    record = (first / "sparkquant" / "calibration.json").read_text()
    assert json.loads(record)["calibration"]["rows"] == 8
    ids = json.loads(rows.read_text())[0]
    assert ", ".join(map(str, ids[:6])) not in record + (first / "sparkquant" / "backend.json").read_text()


@pytest.mark.parametrize(("recipe", "rows_too"), [
    case("qwen-hybrid-w4a16-autoround", True, method="autoround", id="autoround"),
    case("qwen-hybrid-nvfp4-fp8-modelopt", False, method="modelopt", id="modelopt"),
    case("qwen-hybrid-nvfp4a16-mlp-llmcompressor", True, method="llmcompressor", id="llmcompressor"),
])  # fmt: skip
def test_a_shipped_recipe_runs_from_the_command_line(recipe: str, rows_too: bool, rows: Path, tmp_path: Path) -> None:
    allowed = ("--allow", "few-tokens", "--allow", "no-thinking")
    given = ["--calibration", rows, *allowed] if rows_too else []
    method = ["--method", "{name: autoround, iters: 2}"] if "autoround" in recipe else []
    done = spawn("quantize", DEMO, "-r", recipe, "-o", tmp_path / "out", *given, *method)
    assert done.returncode == 0, done.stderr
    assert "verified before it was put in place: ok" in done.stdout
    assert "runs in a process of its own" in done.stderr
    assert spawn("verify", tmp_path / "out", "--source", DEMO, "--deep").returncode == 0
