"""Results of other producers and models of other families: whatever can be read can be measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import sparkquant
from sparkquant.checkpoint import Checkpoint
from sparkquant.drafting import NO_HEAD
from sparkquant.evaluation import compare, evaluate
from sparkquant.evaluation_data import DraftRow, EvaluationRows
from tests.execution.runs import BUILDS, Checkpoints, source_of
from tests.verification.producers import PRODUCERS, produce

pytest.importorskip("transformers")

IDS = tuple(range(7, 300, 6))
ROWS = EvaluationRows((IDS, IDS[:30]), ((IDS[:9], IDS[9:12]),), {"text": (DraftRow(IDS),)})


@pytest.mark.parametrize(
    "producer",
    [pytest.param(name, marks=() if name in ("modelopt mixed", "awq") else pytest.mark.slow) for name in PRODUCERS],
)
def test_results_of_other_producers(producer: str, tmp_path: Path) -> None:
    made = produce(tmp_path, producer)
    data = tmp_path / "rows.json"
    data.write_text(json.dumps([list(IDS), list(IDS[:30])]))
    found = evaluate(made.out, source=made.source, data=data, rows=2)
    assert 0 < found.kl_mean < 1
    assert found.drafts == {"text": 45 + 26}
    assert found.undrafted == {}
    assert found.checks == ()
    assert all(0 < error < 1 for error in found.layers)
    assert not any("embeddings" in note for note in found.notes)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "moe" else pytest.mark.slow) for k in BUILDS])
def test_every_kind_of_hybrid(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = source_of(kind, checkpoints)
    made = sparkquant.quantize(folder, "qwen-hybrid-w4a16", tmp_path / "out", method="rtn")
    found = compare(Checkpoint.open(made.out), Checkpoint.open(folder), ROWS)
    assert math.isfinite(found.kl_mean)
    assert found.kl_mean > 0
    assert found.undrafted == {}
    assert found.drafts == {"text": 45}
    assert set(found.acceptance["text"]) == {"source", "result"}


def test_a_source_without_a_draft_head(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints("qwen3_5_text", mtp=False, layers=4)
    made = sparkquant.quantize(folder, "qwen-hybrid-w4a16", tmp_path / "out", method="rtn")
    data = tmp_path / "rows.json"
    data.write_text(json.dumps([list(IDS)]))
    found = evaluate(made.out, source=folder, data=data, rows=1)
    assert found.undrafted == {"source": NO_HEAD, "result": NO_HEAD}
    assert found.acceptance == {}
    assert {check.id: str(check.status) for check in found.checks}["accept.mtp_acceptance_drop"] == "skipped"


@pytest.mark.slow
def test_the_32m_agrees_with_the_published_divergence(shared: Path, tmp_path: Path) -> None:
    """Mean KL of round-to-nearest int4 over the rows that other tools were measured on: 0.01868."""
    folder = shared / "models" / "hybrid-32m"
    stored = json.loads((shared / "eval" / "heldout-hybrid-32m.json").read_text())
    rows = [row[:512] for row in stored if len(row) >= 512][:24]
    made = sparkquant.quantize(folder, "qwen-hybrid-w4a16", tmp_path / "out", method="rtn")
    found = compare(Checkpoint.open(made.out), Checkpoint.open(folder), EvaluationRows(rows))
    assert found.kl_mean == pytest.approx(0.01868, rel=0.03)
