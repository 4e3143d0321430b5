"""`sparkquant quantize` and `verify`: what they print, and what they leave."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sparkquant.planning import plan
from tests.cli.running import DEMO, invoke
from tests.cli.test_recipes import hybrid_recipes


def test_summary_names_size_verdict_and_next_step(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = invoke("quantize", DEMO, "-r", "qwen-hybrid-fp8", "-o", out, "--method", "rtn")
    assert result.exit_code == 0, result.stderr
    totals = plan(DEMO, "qwen-hybrid-fp8").totals
    assert f"{totals['output_bytes'] / 2**20:.2f} MiB" in result.stdout
    assert f"{totals['bits_per_weight']} bits per weight" in result.stdout
    assert "verified before it was put in place: ok: " in result.stdout
    assert "VLLM_MARLIN_USE_ATOMIC_ADD=1 vllm serve" in result.stdout
    assert "quantize: 8.90 MiB in" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr


def test_json_is_one_document(tmp_path: Path) -> None:
    result = invoke("quantize", DEMO, "-r", "qwen-hybrid-fp8", "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    fields = json.loads(result.stdout)
    made = plan(DEMO, "qwen-hybrid-fp8")
    assert fields["out"] == str(tmp_path / "out")
    assert fields["plan"] == made.digest
    assert fields["totals"] == made.totals
    assert all(check["status"] != "fail" for check in fields["checks"])


def test_an_existing_folder_is_refused(quantized: Path) -> None:
    before = sorted(path.name for path in quantized.iterdir())
    result = invoke("quantize", DEMO, "-o", quantized, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "exists already" in result.stderr
    assert sorted(path.name for path in quantized.iterdir()) == before


def test_out_is_required() -> None:
    assert invoke("quantize", DEMO).exit_code == 2


def test_verify_lists_every_check_and_findings_last(quantized: Path) -> None:
    result = invoke("verify", quantized, "--source", DEMO)
    assert result.exit_code == 0, result.stdout
    assert result.stdout.splitlines()[-1].startswith("ok: ")
    rows = json.loads(invoke("verify", quantized, "--source", DEMO, "--json").stdout)
    assert {"id", "status", "tensors", "message"} <= set(rows[0])
    words = result.stdout.replace(",", " ").split()
    assert all(row["id"].partition(".")[2] in words for row in rows)
    assert len(result.stdout.splitlines()) < 40
    every = invoke("verify", quantized, "--source", DEMO, "--all").stdout
    assert all(f" {row['id']} " in every for row in rows)
    assert all(" ".join(row["message"].split()[:3]) in every for row in rows)


@pytest.mark.parametrize("level", ["--headers", "--deep"])
def test_verify_levels(quantized: Path, level: str) -> None:
    result = invoke("verify", quantized, "--source", DEMO, level, "--json")
    assert result.exit_code == 0, result.stdout
    assert {row["status"] for row in json.loads(result.stdout)} <= {"pass", "skipped", "warn"}


def test_verify_takes_one_level(quantized: Path) -> None:
    assert invoke("verify", quantized, "--headers", "--deep").exit_code == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_a_damaged_checkpoint_is_exit_4(quantized: Path, tmp_path: Path, as_json: bool) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(quantized, damaged)
    config = json.loads((damaged / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (damaged / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = invoke("verify", damaged, "--headers", *(["--json"] if as_json else []))
    assert result.exit_code == 4
    if as_json:
        assert any(row["status"] == "fail" for row in json.loads(result.stdout))
    else:
        lines = result.stdout.splitlines()
        assert lines[-1].startswith("FAILED: ")
        assert [line.split()[0] for line in lines if line and line[0] != " "][-2] == "fail"


def test_a_folder_that_cannot_be_read_is_exit_3(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        result = invoke("verify", folder, "--json")
        assert (result.exit_code, result.stdout) == (3, "")


@pytest.mark.parametrize("recipe", hybrid_recipes())
def test_every_recipe_runs_on_the_demo_checkpoint(recipe: str, tmp_path: Path) -> None:
    result = invoke("quantize", DEMO, "-r", recipe, "-o", tmp_path / "out", "--method", "rtn", "--json")
    assert result.exit_code == 0, result.stderr
    stored = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert 0 < stored - plan(DEMO, recipe).totals["output_bytes"] < 64 * 1024
