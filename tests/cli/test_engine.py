"""`--engine` of plan and verify: the kernels of one version, in words and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkquant.execute import quantize
from tests.checkpoints import build
from tests.cli.running import invoke


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small result."""
    folder = tmp_path_factory.mktemp("engine")
    source = build("qwen3_5", folder / "source")
    return quantize(source, recipe="qwen-hybrid-nvfp4-fp8", out=folder / "out", method="rtn").out


def test_a_plan_says_where_modules_will_run(big: Path) -> None:
    text = invoke("plan", big, "-r", "qwen-hybrid-nvfp4-fp8").stdout
    engine = text[text.index("\nEngine ") :]
    assert "capability 12.1 (GB10)" in engine
    assert engine.count("Marlin") >= 3
    assert "Cutlass" in engine
    assert "changes nothing here" in " ".join(engine.split())
    named = invoke("plan", big, "--engine", "vllm==0.28.0").stdout
    assert "Engine vllm==0.28.0" in named
    assert "by the rules of 0.26" in " ".join(named.split())
    assert "on 9.0: Humming 129, Cutlass 128" in engine
    hopper = invoke("plan", big, "-r", "qwen-hybrid-w4a16", "--engine", "0.25", "--capability", "9.0").stdout
    assert "Machete" in hopper
    assert "on 8.6" not in hopper
    refused = invoke("plan", big, "-r", "qwen-hybrid-w4a16", "--capability", "7.0")
    assert refused.exit_code == 2
    assert "compute capability 7.0 is below 7.5" in refused.stderr
    assert invoke("plan", big, "--capability", "gb10").exit_code == 2
    unknown = invoke("plan", big, "--engine", "vllm==0.12")
    assert unknown.exit_code == 2
    assert "0.25, 0.26, 0.33" in unknown.stderr


def test_verify_shows_the_table_when_asked(result: Path) -> None:
    plain = invoke("verify", result, "--headers")
    assert "Engine" not in plain.stdout
    shown = invoke("verify", result, "--headers", "--engine", "0.25.1", "--tp", "1,2", "--capability", "9.0")
    assert shown.exit_code == 0
    assert "Engine 0.25.1, capability 9.0, tensor parallel 1, 2" in shown.stdout
    assert "mlp.down" in shown.stdout
    found = json.loads(invoke("verify", result, "--headers", "--json").stdout)
    table = next(check for check in found if check["id"] == "rules.kernel")["measured"]
    assert table["rows"]


def test_a_refused_module_is_red(result: Path) -> None:
    done = invoke("verify", result, "--headers", "--engine", "0.25", "--tp", "64")
    assert done.exit_code == 4
    assert "refused" in done.stdout
    assert invoke("verify", result, "--headers", "--capability", "twelve").exit_code == 2


def test_quantize_refuses_a_version_that_cannot_load_the_result(tmp_path: Path) -> None:
    source = build("qwen3_5_text", tmp_path / "source")
    done = invoke("quantize", source, "--method", "mse", "-o", tmp_path / "out", "--engine", "vllm==0.25.1")
    assert done.exit_code == 2
    assert "the text-only class came later" in done.stderr
    assert not (tmp_path / "out").exists()
    made = invoke(
        "quantize", source, "--method", "mse", "-o", tmp_path / "out", "--engine", "vllm==0.33.0", "--method", "rtn"
    )
    assert made.exit_code == 0, made.stderr
