"""`sparkquant evaluate`: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.running import invoke, spawn
from tests.evaluation.conftest import EXAMPLE, Edited, set_limits
from tests.evaluation.test_sabotage import poison

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a short run: two rows of 80 ids, and one task."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "rows.json").write_text(json.dumps([list(range(100 + n, 180 + n)) for n in range(2)]))
    task = {"messages": [{"role": "user", "content": "Say yes"}], "answer": "yes"}
    (folder / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    return ["--data", str(folder / "rows.json"), "--tasks", str(folder / "tasks.jsonl")]


@pytest.fixture
def result(quantized: Path, tmp_path: Path) -> Path:
    """A copy of the result whose limits a test may set."""
    return Path(shutil.copytree(quantized, tmp_path / "result"))


def test_numbers_as_text(result: Path, data: list[str]) -> None:
    set_limits(result, kl_mean=5, mtp_acceptance_drop=1)
    done = invoke("evaluate", result, "--source", EXAMPLE, *data)
    assert done.exit_code == 0, done.stderr
    for words in (
        "2 rows, 160 tokens, 1 recall tasks", "KL mean, nats per token", "KL 99th percentile",
        "same most likely token", "exact recall", "text, source", "text, result", "drafts accepted up to position",
        "accept.kl_mean", "ok: 2 pass", "Blocks that added most",
    ):  # fmt: skip
        assert words in done.stdout
    assert "evaluate: " in done.stderr
    assert "score: " in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_one_json_document(result: Path, data: list[str]) -> None:
    set_limits(result)
    done = spawn("evaluate", result, "--source", EXAMPLE, *data, "--json", "--rows", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert found["checks"] == []
    assert found["rows"] == len(found["kl_rows"]) == 1
    assert found["kl_se"] is None
    assert set(found["recall"]) == {"tasks", "source", "result", "lost"}
    assert len(found["acceptance"]["text"]["result"]) == 4
    assert found["source"] == str(EXAMPLE)


def test_a_violated_limit(result: Path, data: list[str]) -> None:
    set_limits(result, kl_mean=1e-9, mtp_acceptance_drop=1)
    done = invoke("evaluate", result, "--source", EXAMPLE, *data)
    assert done.exit_code == 4
    assert "FAILED: 1 pass, 1 fail" in done.stdout
    assert "over the recipe's limit of 1e-09" in " ".join(done.stdout.split())


def test_a_limit_that_was_not_measured(result: Path, data: list[str]) -> None:
    set_limits(result, kl_mean=5, mtp_acceptance_drop=1)
    done = invoke("evaluate", result, "--source", EXAMPLE, *data, "--rows", 1, "--tokens", 40)
    assert done.exit_code == 7
    assert "36 drafts are too few" in " ".join(done.stdout.split())
    set_limits(result, kl_mean=1e-9, mtp_acceptance_drop=1)
    assert invoke("evaluate", result, "--source", EXAMPLE, *data, "--rows", 1, "--tokens", 40).exit_code == 4


def test_results_without_a_recipe_have_no_limits(data: list[str]) -> None:
    done = invoke("evaluate", EXAMPLE, "--source", EXAMPLE, *data, "--rows", 1)
    assert done.exit_code == 0
    assert "no limits to hold these numbers against" in done.stdout
    assert "0.00000" in done.stdout


def test_faults_and_their_codes(quantized: Path, data: list[str], edited: Edited, tmp_path: Path) -> None:
    broken = edited(quantized, poison("lm_head.weight"))  # type: ignore[arg-type]
    done = invoke("evaluate", broken, "--source", EXAMPLE, *data)
    assert done.exit_code == 4
    assert "the result computes NaN or infinity in its logits" in done.stderr
    assert done.stdout == ""
    for arguments, code, words in (
        ([tmp_path / "nowhere", "--source", EXAMPLE], 3, "no such folder"),
        ([quantized, "--source", EXAMPLE, "--rows", 0], 2, "rows=0"),
        ([quantized, "--source", EXAMPLE, "--device", "cuda:99"], 5, "cannot be used"),
        ([quantized, "--source", EXAMPLE, "--data", "no-such-mix"], 2, "no calibration mix"),
        ([quantized], 2, "--source"),
    ):
        done = invoke("evaluate", *arguments)
        assert done.exit_code == code, done.stderr
        assert words in done.stderr
