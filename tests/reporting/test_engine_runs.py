"""Records of `validate` and `bench` in a report: every number with its conditions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkquant import evidence
from sparkquant.marlin.bench_record import make_record
from sparkquant.measured import Controls, Throughput, parsed
from sparkquant.reporting import report_on
from tests.reporting.conftest import Page
from tests.reporting.test_page import cells

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


def bench_fields() -> dict[str, Any]:
    """The shape of a record of `bench`, with numbers made up for this test."""
    return {
        "model": "out", "versions": {"vllm": "0.25.1", "sparkquant": "0.1.0"}, "capability": "9.0", "hardware": "a GPU",
        "environment": {"VLLM_MARLIN_USE_ATOMIC_ADD": "1"}, "arguments": ["--max-model-len", "4096"],
        "speculation": {"method": "none", "k": 0}, "thinking": False, "cache": {"state": "off", "hit_rate": 0},
        "lengths": {"prompt": 100, "output": 50, "max_tokens": 64, "ended": 0.2}, "kv_cache_tokens": 4096,
        "prompts": "bundled", "distinct_prompts": 16, "warm_up_rounds": 1,
        "decode": {"edit": {"rounds": [100, 110, 120]}, "fresh": {"rounds": [90, 95, 91]}},
        "aggregate": {"1": {"rounds": [100, 101, 102]}, "8": {"rounds": [400, 410, 420]}},
        "prefill": {"rounds": [1000, 1100, 1200]}, "first_token": {"rounds": [0.05, 0.051, 0.06]}, "acceptance": {},
    }  # fmt: skip


def validated() -> dict[str, Any]:
    """The shape of a record of `validate`, with numbers made up for this test."""

    def distance(kl: float) -> dict[str, Any]:
        return {
            "rows": 8, "positions": 800, "kl": kl, "kl_se": kl / 10, "kl_high": 2 * kl, "p99": 9 * kl, "top1": 0.97,
            "nll": [1.5, 1.51], "unseen": 0.01,
        }  # fmt: skip

    def run(**fields: Any) -> dict[str, Any]:
        broken = {
            "3": [{"id": "exclamation-marks", "what": "9 exclamation marks"}],
            "4": [{"id": "no-eos", "what": "cut"}],
        }
        answers = {"1": {"asked": 16, "failed": 1, "mean_tokens": 40.5, "ended": 9, "findings": broken}}
        kernels = [{"kernel": "MarlinLinearKernel", "scheme": "int4", "experts": False, "model": "target"}]
        return {"failed": "", "kernels": kernels, "eager": False, "graphs": True, "answers": answers, **fields}

    return {
        "ok": True,
        "verdict": {"outcome": "pass", "summary": "kernels agree", "evidence": [], "next": "sparkquant bench"},
        "conditions": {"version": "0.25.1", "capability": "9.0", "machine": {"driver": "570", "gpus": [{"name": "x"}]}},
        "runs": {"candidate": run(), "eager": run(eager=True), "backend": run(failed="did not start", answers={})},
        "to_controls": {"eager": distance(1e-5), "backend": None}, "to_reference": {"candidate": distance(0.012)},
        "notes": [], "checks": [],
    }  # fmt: skip


def test_throughput_with_its_conditions(copied: Callable[[str], Path]) -> None:
    folder = copied("timed")
    evidence.record(folder, "bench", make_record(bench_fields()).as_json())
    page = Page(report_on([folder]))
    rows = cells(page, "Medians, and the slowest and fastest round")
    assert rows["one stream, edit"] == ["110.0 (100.0 to 120.0)"]
    assert rows["8 streams together"] == ["410.0 (400.0 to 420.0)"]
    assert rows["seconds to the first token"] == ["0.051 (0.050 to 0.060)"]
    conditions = cells(page, "Conditions of the numbers")
    assert conditions["hardware"] == ["a GPU"]
    assert conditions["speculation, method"] == ["none"]
    assert conditions["thinking"] == ["no"]
    assert conditions["environment, VLLM_MARLIN_USE_ATOMIC_ADD"] == ["1"]
    assert {"capability", "cache, state", "lengths, output", "kv cache tokens", "arguments"} <= conditions.keys()
    assert "answers were cut at 64 tokens" in page.root.text
    assert "throughput was not measured" not in page.root.text


def test_control_runs_with_their_conditions(copied: Callable[[str], Path]) -> None:
    folder = copied("validated")
    evidence.record(folder, "validate", validated())
    page = Page(report_on([folder]))
    assert cells(page, "What validate proved")["validated"] == ["pass", "kernels agree", "sparkquant bench"]
    runs = cells(page, "Control runs")
    assert runs["candidate"] == ["MarlinLinearKernel", "yes", "14 of 16 sound at 1", "–"]
    assert runs["eager"][1] == "no, eager"
    assert runs["backend"] == ["MarlinLinearKernel", "yes", "–", "did not start"]
    distances = cells(page, "Distances between runs")
    assert distances["candidate to eager"][0] == "1.0e-05"
    assert distances["reference to candidate"][:2] == ["0.01200", "0.00120"]
    conditions = cells(page, "Conditions of the runs")
    assert (conditions["machine, driver"], conditions["machine, gpus 1, name"]) == (["570"], ["x"])


def test_several_checkpoints_share_the_charts(copied: Callable[[str], Path], mixed: Path) -> None:
    a, b = copied("a"), copied("b")
    for folder in (a, b):
        evidence.record(folder, "bench", make_record(bench_fields()).as_json())
        evidence.record(folder, "validate", validated())
    page = Page(report_on([a, b, mixed]))
    assert len([f for f in page.root.all("figure") if f.all("h3")[0].text == "Tokens per second"]) == 1
    assert len([f for f in page.root.all("figure") if f.all("h3")[0].text.startswith("Runs of")]) == 2
    assert "C mixed: throughput was not measured." in page.root.text
    assert "| one stream, edit | 110.0" in report_on([a, b], form="md")


# Recorded on a real engine

ROOT = Path(__file__).resolve().parents[2]
REAL = sorted((ROOT / "tests" / "marlin" / "records").glob("*/record.json"))


def real(path: Path) -> dict[str, Any]:
    """What a verb returned when it ran on a GPU."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found.get("result", found)


@pytest.mark.parametrize(
    "path", [path for path in REAL if {"verdict", "decode"} & real(path).keys()], ids=lambda p: p.parent.name
)
def test_real_records_are_read(path: Path) -> None:
    kind = Throughput if "decode" in real(path) else Controls
    result, fault = parsed(kind, real(path))
    assert (result is not None, fault) == (True, "")


def test_a_page_of_real_records(copied: Callable[[str], Path]) -> None:
    by_name = {path.parent.name: real(path) for path in REAL}
    if not {"w4a16", "bench-k2"} <= by_name.keys():
        pytest.skip("no recorded runs in this checkout")
    folder = copied("served")
    evidence.record(folder, "validate", by_name["w4a16"])
    evidence.record(folder, "bench", by_name["bench-k2"])
    page = Page(report_on([folder]))
    runs = cells(page, "Control runs")
    assert set(runs) == set(by_name["w4a16"]["runs"])
    assert "Marlin" in runs["candidate"][0]
    assert cells(page, "What validate proved")["served"][0] == by_name["w4a16"]["verdict"]["outcome"]
    medians = cells(page, "Medians, and the slowest and fastest round")
    for kind, median in by_name["bench-k2"]["medians"]["decode"].items():
        assert medians[f"one stream, {kind}"][0].startswith(f"{median:,.1f} (")
    assert cells(page, "Conditions of the numbers")["capability"] == [by_name["bench-k2"]["capability"]]
