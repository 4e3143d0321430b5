"""`verify(engine=, tp=, capability=)` and the table of kernels, from plans and from checkpoints alike."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkquant.engine.versions import engine_named
from sparkquant.errors import PlanError, UsageError
from sparkquant.planning import plan
from sparkquant.report import Status
from sparkquant.routing import engine_routes
from sparkquant.verification.gate import verify
from tests.checkpoints import build
from tests.data.published import QWEN3_5_27B, qwen3_5_27b_shapes, write_headers
from tests.verification.conftest import Draft, Good, findings
from tests.verification.headers import write_result
from tests.verification.producers import produce

MIXED = "qwen-hybrid-nvfp4-fp8"


def kernels(table: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    """By class and scheme."""
    found: dict[tuple[str, str], set[str]] = {}
    for row in table["rows"]:
        found.setdefault((row["class"], row["scheme"]), set()).add(row["kernel"])
    return found


@pytest.mark.parametrize(
    ("text", "rules", "noted"),
    [
        ("vllm==0.25.1", "0.25", False),
        ("0.25", "0.25", False),
        ("0.26.0", "0.26", False),
        ("vllm==0.28.0", "0.26", True),
        ("0.32", "0.26", True),
        ("v0.33.0", "0.33", False),
    ],
)
def test_versions(text: str, rules: str, noted: bool) -> None:
    engine = engine_named(text)
    assert (engine.rules, bool(engine.note)) == (rules, noted)


@pytest.mark.parametrize("text", ["0.24.0", "0.34", "1.0", "sglang==0.5", "", "0", "vllm"])
def test_unknown_versions_name_the_known_ones(text: str, good: Good) -> None:
    with pytest.raises(UsageError, match=r"0\.25, 0\.26, 0\.33"):
        verify(good(MIXED).out, engine=text, level="headers")


def test_wrong_sizes_and_capabilities(good: Good) -> None:
    out = good(MIXED).out
    with pytest.raises(UsageError, match="tensor-parallel size 0"):
        verify(out, tp=(0,))
    with pytest.raises(UsageError, match="sm_121"):
        verify(out, capability="sm_121")
    with pytest.raises(UsageError, match="tensor-parallel"):
        engine_routes(out, tp=(-1,))


def test_the_27b_as_planned_and_as_stored(tmp_path: Path) -> None:
    source = write_headers(tmp_path / "source", QWEN3_5_27B, qwen3_5_27b_shapes(), shards=18)
    out = write_result(source, MIXED, tmp_path / "out")
    report = verify(out, level="headers", engine="vllm==0.25.1", tp=(1, 2), capability="12.1")
    check = next(check for check in report.checks if check.id == "rules.kernel")
    assert check.status is Status.PASS
    assert kernels(check.measured) == {
        ("attention.out", "fp8"): {"Cutlass"},
        ("attention.qkv", "fp8"): {"Cutlass"},
        ("linear_attention.out", "fp8"): {"Cutlass"},
        ("linear_attention.qkvz", "fp8"): {"Cutlass"},
        ("lm_head", "nvfp4a16"): {"Marlin"},
        ("mlp.down", "nvfp4a16"): {"Marlin"},
        ("mlp.gate_up", "nvfp4a16"): {"Marlin"},
    }
    assert "changes nothing here" in check.measured["atomic_add"]
    rows = {(row["class"], row["tp"]): row for row in check.measured["rows"]}
    assert rows["mlp.gate_up", 1]["size"] == [2 * 17408, 5120]
    assert rows["mlp.gate_up", 2]["size"] == [17408, 5120]
    assert rows["mlp.down", 2]["size"] == [5120, 8704]
    assert rows["linear_attention.qkvz", 1]["size"] == [16384, 5120]
    assert rows["linear_attention.qkvz", 1]["count"] == 48
    assert rows["mlp.gate_up", 1]["count"] == 64
    made = engine_routes(plan(source, MIXED), "0.25.1", (1, 2))
    assert made.as_json()["rows"] == check.measured["rows"]
    assert kernels(engine_routes(out, "0.33", capability="9.0").as_json())["mlp.down", "nvfp4a16"] == {"Humming"}


def test_atomic_adds_are_listed(tmp_path: Path) -> None:
    source = build("qwen3_5", tmp_path / "source", hidden=2048, layers=1)
    table = engine_routes(plan(source, "qwen-hybrid-w4a16"), "0.25", (1,))
    listed = {row.label for row in table.rows if row.atomic_add}
    assert listed
    assert all(row.size[0] < 2048 <= row.size[1] for row in table.rows if row.atomic_add)
    assert all(label in table.atomic_add for label in listed)
    assert not any(row.atomic_add for row in engine_routes(plan(source, "qwen-hybrid-w4a16"), capability="8.6").rows)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers"])
def test_a_size_that_config_leaves_out_is_a_warning(key: str, draft: Callable[..., Draft]) -> None:
    """Engines then take the default of their class: it may be right, and `rules.ranks` cannot say."""
    copy = draft("qwen-hybrid-fp8")
    del copy.config["text_config"][key]
    copy.save()
    (check,) = [check for check in verify(copy.path, level="headers").checks if check.id == "config.sizes"]
    assert check.status == "warn"
    assert check.message == f"config.json does not state {key}: engines take the default of their class"


def test_a_rank_that_cuts_a_group_is_refused(good: Good) -> None:
    out = good("qwen-hybrid-w4a16").out
    assert findings(verify(out, level="headers", tp=(2,))) == set()
    report = verify(out, level="headers", tp=(1, 8))
    assert findings(report) == {"rules.ranks", "rules.kernel"}
    check = next(check for check in report.failed if check.id == "rules.kernel")
    assert "straddle" in check.message
    assert "tensor parallel 8" in check.message
    assert {row["kernel"] for row in check.measured["rows"] if row["tp"] == 1} == {"Marlin"}


def test_ranks_that_cannot_share_the_heads_are_red_whatever_the_schemes(good: Good) -> None:
    out = good("qwen-hybrid-fp8").out
    for size, reason in ((3, "the number of attention heads, 2 (num_attention_heads), does not divide over 3 ranks"),
                         (4, "does not divide over 4 ranks")):  # fmt: skip
        report = verify(out, level="headers", tp=(1, size))
        (check,) = [check for check in report.failed if check.id == "rules.ranks"]
        assert check.message.startswith(f"tensor parallel {size}: ")
        assert reason in check.message
        assert check.message.endswith("of 1, 2, 4, 8, 16 these fit: 1, 2")
        kernel = next(check for check in report.checks if check.id == "rules.kernel")
        rows = kernel.measured["rows"]
        assert {row["kernel"] for row in rows if row["tp"] == size} == {"refused"}
        assert "refused" not in {row["kernel"] for row in rows if row["tp"] == 1}
        assert {row["kernel"] for row in engine_routes(out, tp=(size,)).as_json()["rows"]} == {"refused"}


def test_versions_resolve_by_their_own_order(draft: Callable[..., Draft]) -> None:
    copy = draft(MIXED)
    copy.group("float-quantized")["targets"] = ["Linear"]
    copy.group("nvfp4-pack-quantized")["targets"] = [r"re:.*mlp\.(?:gate|up|down)_proj$", "re:.*lm_head$"]
    copy.save()
    assert "rules.order" in findings(verify(copy.path, level="headers"))
    new = verify(copy.path, level="headers", engine="0.33")
    assert findings(new) == {"rules.class_target"}
    old = verify(copy.path, level="headers", engine="0.25")
    assert findings(old) == {"rules.class_target", "rules.split_scheme"}


def test_a_class_that_the_version_lacks(good: Good) -> None:
    result = good("qwen-hybrid-w4a16", "qwen3_5_text")
    assert findings(verify(result.out, level="headers", engine="0.33")) == set()
    report = verify(result.out, level="headers", engine="0.25.1")
    assert findings(report) == {"rules.engine"}


@pytest.mark.parametrize(
    ("producer", "version", "capability", "expected"),
    [
        ("modelopt nvfp4", "0.25", "12.1", {"FlashInfer Cutlass or Cutlass"}),
        ("modelopt nvfp4", "0.25", "9.0", {"Marlin"}),
        ("modelopt w4a16 nvfp4", "0.25", "9.0", {"Marlin"}),
        ("modelopt w4a16 nvfp4", "0.33", "9.0", {"Humming"}),
        ("modelopt fp8", "0.25", "12.1", {"FlashInfer or Cutlass"}),
        ("modelopt fp8", "0.25", "8.6", {"refused"}),
        ("modelopt fp8", "0.33", "8.6", {"Humming or Marlin"}),
        ("gptq", "0.25", "12.1", {"Marlin"}),
        ("gptq", "0.25", "9.0", {"Machete"}),
        ("awq", "0.33", "12.1", {"Marlin"}),
        ("auto-round", "0.25", "12.1", {"Marlin"}),
        ("fp8 block", "0.25", "12.1", {"DeepGEMM or Cutlass"}),
        ("fp8 block", "0.25", "8.6", {"Marlin"}),
        ("fp8 tensor", "0.25", "12.1", {"FlashInfer or Cutlass"}),
    ],
)
def test_kernels_of_producers(producer: str, version: str, capability: str, expected: set[str], tmp_path: Path) -> None:
    made = produce(tmp_path, producer)
    table = engine_routes(made.out, version, capability=capability)
    assert {kernel for found in kernels(table.as_json()).values() for kernel in found} == expected
    refused = expected == {"refused"}
    report = verify(made.out, level="headers", engine=version, capability=capability)
    assert findings(report) == ({"rules.kernel"} if refused else set())


@pytest.mark.parametrize(
    ("recipe", "capability", "expected"),
    [
        ("qwen-hybrid-w4a16", "12.1", "Marlin MoE"),
        ("qwen-hybrid-fp8", "12.1", "Triton MoE"),
        ("qwen-hybrid-fp8", "8.6", "Marlin MoE"),
    ],
)
def test_experts_are_one_module_a_layer(recipe: str, capability: str, expected: str, good: Good) -> None:
    result = good(recipe, "qwen3_5_moe")
    from_plan = engine_routes(plan(result.source, recipe), "0.25", capability=capability).rows
    from_file = engine_routes(result.out, "0.25", capability=capability).rows
    for rows in (from_plan, from_file):
        (experts,) = [row for row in rows if row.label == "experts"]
        assert (experts.kernel, experts.count, experts.size) == (expected, 4, (128, 256))


def test_experts_whose_groups_are_cut_by_ranks_are_refused(good: Good) -> None:
    """Plan, its kernels and the verification of the result say the same."""
    result = good("qwen-hybrid-w4a16", "qwen3_5_moe")
    reason = "the inner size of a rank, 64, is not a multiple of the group size 128"
    for subject in (result.out, plan(result.source, "qwen-hybrid-w4a16")):
        rows = engine_routes(subject, "0.25", (2,)).rows
        (experts,) = [row for row in rows if row.label == "experts"]
        assert experts.kernel == ""
        assert experts.reason.startswith(reason)
    assert "rules.kernel" in findings(verify(result.out, level="headers", tp=(2,)))
    with pytest.raises(PlanError):
        plan(result.source, "qwen-hybrid-w4a16", tp=(2,))


def test_the_table_needs_no_torch(good: Good) -> None:
    out = good(MIXED).out
    program = (
        "import sys; from sparkquant.routing import engine_routes;"
        f"assert engine_routes({str(out)!r}, '0.25').rows; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_the_report_is_plain_json(good: Good) -> None:
    report = verify(good(MIXED).out, level="headers", engine="0.28.1")
    table = next(check for check in json.loads(report.to_json()) if check["id"] == "rules.kernel")["measured"]
    assert table["rules"] == "0.26"
    assert "not read" in table["notes"][0]


def test_activation_orders_are_read_by_older_versions_alone(draft: Callable[..., Draft]) -> None:
    copy = draft("qwen-hybrid-w4a16")
    copy.forget_plan()
    copy.group("pack-quantized")["weights"]["actorder"] = "group"
    for name in [name for name in copy.tensors if name.endswith(".weight_packed")]:
        columns = copy.tensors[name][1][1] * 8
        copy.tensors[f"{name.removesuffix('packed')}g_idx"] = ("I32", (columns,), bytes(4 * columns))
    copy.save()
    for options in ({}, {"engine": "0.33"}):
        report = verify(copy.path, level="headers", **options)  # type: ignore[arg-type]
        assert {"config.actorder", "tensors.g_idx"} <= {check.id for check in report.failed}
    assert "rules.kernel" in findings(verify(copy.path, level="headers", engine="0.33"))
    older = verify(copy.path, level="headers", engine="0.25.1")
    assert findings(older) == {"config.actorder", "tensors.g_idx"}
    assert older.ok
    divided = verify(copy.path, level="headers", engine="0.25.1", tp=(2,))
    assert {check.id for check in divided.failed} == {"rules.kernel"}
    assert "cannot be divided" in divided.failed[0].message


def test_other_capabilities_are_told_when_none_is_named(good: Good) -> None:
    out = good(MIXED).out
    check = next(c for c in verify(out, level="headers").checks if c.id == "rules.kernel")
    assert check.measured["capability"] == "12.1"
    assert set(check.measured["elsewhere"]) == {"9.0", "8.6"}
    ampere = {(row["class"], row["kernel"]) for row in check.measured["elsewhere"]["8.6"]}
    assert ("attention.qkv", "Humming or Marlin") in ampere
    named = next(c for c in verify(out, level="headers", capability="9.0").checks if c.id == "rules.kernel")
    assert named.measured["elsewhere"] == {}


def test_experts_with_an_activation_that_marlin_lacks_are_refused(draft: Callable[..., Draft]) -> None:
    copy = draft("qwen-hybrid-w4a16", "qwen3_5_moe")
    copy.config["text_config"]["hidden_act"] = "relu"
    copy.save()
    report = verify(copy.path, level="headers")
    assert findings(report) == {"rules.kernel"}
    assert "activation 'relu'" in report.failed[0].message


def test_versions_that_load_it_are_told_when_none_is_named(good: Good) -> None:
    def said(model_type: str) -> str:
        report = verify(good("qwen-hybrid-w4a16", model_type).out, level="headers")
        return next(check.message for check in report.checks if check.id == "rules.engine")

    assert said("qwen3_5").endswith("0.25, 0.26, 0.33 can load it")
    assert said("qwen3_5_text").endswith("0.33 can load it")
