"""What these quantizers get wrong by themselves, and that it does not reach a result.

A test of a trap runs the real package twice where it can: with the handling, and sabotaged without it, which must be
noticed and refused. So a handling that is no longer needed, or no longer works, shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sparkquant
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckFailed, EnvironmentMissing, Resumable
from sparkquant.formats import dequantize, stored_modules
from tests.backends.packages import needs, quantized, sabotaged
from tests.checkpoints import read_raw
from tests.cli.running import DEMO
from tests.tensors import read_tensor

Checkpoints = Callable[..., Path]
AUTOROUND = {"name": "autoround", "iters": 1}
NVFP4, INT4 = "qwen-hybrid-nvfp4-fp8", "qwen-hybrid-w4a16"

pytestmark = pytest.mark.slow


def global_scales(folder: Path, *parts: str) -> list[set[float]]:
    """Distinct global scales in every module that has all these parts."""
    checkpoint = Checkpoint.open(folder)
    names = [n for n in checkpoint.tensors if n.endswith(f".{parts[0]}.weight_global_scale")]
    found = []
    for name in names:
        parent = name.rpartition(f".{parts[0]}.")[0]
        found.append({float(read_tensor(checkpoint, f"{parent}.{p}.weight_global_scale")) for p in parts})
    assert found
    return found


ALL_NVFP4 = {
    "name": "all-nvfp4", "summary": "NVFP4 on every decoder Linear", "families": ["qwen3_5", "qwen3_5_moe"],
    "schemes": dict.fromkeys(
        ("attention.qkv", "linear_attention.qkvz", "mlp.gate_up", "experts.gate_up", "experts.down"), "nvfp4a16"
    ),
}  # fmt: skip


@needs("llmcompressor")
def test_parts_that_are_fused_share_a_global_scale(
    checkpoints: Checkpoints, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llm-compressor knows q/k/v and gate/up, not in_proj_qkv and in_proj_z."""
    source = checkpoints("qwen3_5")
    out = quantized(source, tmp_path / "out", ALL_NVFP4, "llmcompressor", rows).out
    for parts in (("in_proj_qkv", "in_proj_z"), ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        assert all(len(scales) == 1 for scales in global_scales(out, *parts))
    adapter = "from sparkquant.backends import llmcompressor\nllmcompressor._share_global_scales = lambda work: None"
    sabotaged(monkeypatch, adapter)
    with pytest.raises(CheckFailed) as raised:
        quantized(source, tmp_path / "bad", ALL_NVFP4, "llmcompressor", rows)
    assert [problem.where for problem in raised.value.problems] == ["scales.global"]
    assert not (tmp_path / "bad").exists()


@needs("modelopt")
def test_experts_share_a_global_scale_between_gate_and_up(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoints("qwen3_5_moe")
    out = quantized(source, tmp_path / "out", ALL_NVFP4, "modelopt", None).out
    assert all(len(scales) == 1 for scales in global_scales(out, "gate_proj", "up_proj"))
    assert all(len(scales) == 1 for scales in global_scales(out, "in_proj_qkv", "in_proj_z"))
    adapter = "from sparkquant.backends import modelopt\nmodelopt._share_global_scales = lambda work, found: None"
    sabotaged(monkeypatch, adapter)
    with pytest.raises(CheckFailed) as raised:
        quantized(source, tmp_path / "bad", ALL_NVFP4, "modelopt", None)
    assert [problem.where for problem in raised.value.problems] == ["scales.global"]


@needs("llmcompressor")
def test_norms_that_are_rewritten_are_noticed(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llm-compressor turns w into 1 + w and back, in BF16: AWQ needs that, and nothing here does."""
    adapter = "from sparkquant.backends import llmcompressor\nllmcompressor._leave_norms = lambda: None"
    sabotaged(monkeypatch, adapter)
    with pytest.raises(CheckFailed, match="did not do what the plan says") as raised:
        quantized(DEMO, tmp_path / "bad", INT4, "llmcompressor", rows)
    assert {problem.what for problem in raised.value.problems} == {"was changed, the plan keeps it as it is"}
    assert all("norm" in problem.where for problem in raised.value.problems)
    assert not (tmp_path / "bad").exists()


@needs("llmcompressor")
def test_a_smoothed_router_or_gate_would_be_reported(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real AWQ modifier in place of GPTQ: every kept tensor that it rewrites is named."""
    adapter = (
        "from sparkquant.backends import llmcompressor\n"
        "from llmcompressor.modifiers.quantization import QuantizationModifier\n"
        "from llmcompressor.modifiers.transform.awq import AWQModifier\n"
        "from llmcompressor.pipelines.cache import IntermediatesCache\n"
        "IntermediatesCache.pin_memory = lambda self, *a, **k: None\n"
        "def awq(work, groups):\n"
        "    return [AWQModifier(duo_scaling=False, n_grid=4), QuantizationModifier(config_groups=groups, ignore=[])]\n"
        "llmcompressor._modifiers = awq"
    )
    sabotaged(monkeypatch, adapter)
    with pytest.raises(CheckFailed) as raised:
        quantized(DEMO, tmp_path / "bad", INT4, "llmcompressor", rows)
    named = " ".join(problem.where for problem in raised.value.problems)
    assert "layernorm" in named
    assert "in_proj_a" in named


@needs("autoround")
def test_gates_of_32_rows_stay_what_they_were(
    wide_gates: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoRound quantizes in_proj_a and in_proj_b unless they are named, when their rows divide by 32."""
    out = quantized(wide_gates, tmp_path / "out", INT4, AUTOROUND, rows).out
    before, after = read_raw(wide_gates), read_raw(out)
    gates = [name for name in before if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log"))]
    assert len(gates) == 9
    assert all(before[name] == after[name] for name in gates)
    assert before[gates[0]][0] == after[gates[0]][0] == "F32"  # A_log, which other exports cast to BF16
    adapter = (
        "import torch\nfrom sparkquant.backends import autoround\n"
        "class Linear(torch.nn.Linear): pass\n"
        "class nn:\n    Linear = Linear\n    Module = torch.nn.Module\n"
        "autoround.nn = nn"  # nothing is named: everything takes the base scheme
    )
    sabotaged(monkeypatch, adapter)
    with pytest.raises(CheckFailed) as raised:
        quantized(wide_gates, tmp_path / "bad", INT4, AUTOROUND, rows)
    extra = {problem.where for problem in raised.value.problems if problem.what == "was quantized, the plan keeps it"}
    assert any(name.endswith("in_proj_a") for name in extra)


@needs("autoround")
def test_masks_of_the_first_block_are_not_reused(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask AutoRound hands the delta net's to the attention block, which stops: no result, and exit 5."""
    adapter = (
        "import torch\nimport auto_round\nreal = auto_round.AutoRound\n"
        "def masked(*args, dataset, **more):\n"
        "    return real(*args, dataset=[d['input_ids'] for d in dataset], **more)\n"
        "auto_round.AutoRound = masked"
    )
    sabotaged(monkeypatch, adapter)
    with pytest.raises(EnvironmentMissing, match=r"AutoRound 0\.15\.1 stopped with exit code 1") as raised:
        quantized(DEMO, tmp_path / "bad", INT4, AUTOROUND, rows)
    assert any("mask" in problem.what for problem in raised.value.problems)


@needs("autoround")
def test_a_library_that_ends_the_process_ends_its_own(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoRound calls exit(-1) when no row is long enough."""
    adapter = "from sparkquant.backends import autoround\nautoround.piece_length = lambda lengths: 64\n" \
              "import auto_round\nreal = auto_round.AutoRound\n" \
              "auto_round.AutoRound = lambda *a, **k: real(*a, **{**k, 'seqlen': 999})"  # fmt: skip
    sabotaged(monkeypatch, adapter)
    with pytest.raises(EnvironmentMissing, match="stopped with exit code 255") as raised:
        quantized(DEMO, tmp_path / "bad", INT4, AUTOROUND, rows)
    assert any("no data has been cached" in problem.what for problem in raised.value.problems)
    assert "log.txt" in raised.value.hint


@needs("llmcompressor")
def test_patterns_that_match_nothing_are_no_success(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llm-compressor says nothing and leaves the model as it was."""
    adapter = (
        "from sparkquant.backends import llmcompressor\nllmcompressor.patterns = lambda targets: ['re:.*nothing$']"
    )
    sabotaged(monkeypatch, adapter)
    with pytest.raises(CheckFailed) as raised:
        quantized(DEMO, tmp_path / "bad", INT4, {"name": "llmcompressor", "modifier": "imatrix"}, rows)
    missed = [p.where for p in raised.value.problems if p.what == "is in the plan and was not quantized"]
    assert len(missed) == 25
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv" in missed


@needs("modelopt")
def test_fp8_is_by_row_with_dynamic_inputs_whatever_modelopt_defaults_to(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoints("qwen3_5")
    out = quantized(source, tmp_path / "out", NVFP4, "modelopt", None).out
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"].values()
    (fp8,) = (group for group in groups if group["weights"]["num_bits"] == 8)
    assert (fp8["weights"]["strategy"], fp8["input_activations"]["strategy"]) == ("channel", "token")
    assert fp8["input_activations"]["dynamic"] is True
    stored = read_raw(out)
    assert not [name for name in stored if "input_scale" in name]
    told = json.loads((out / "sparkquant" / "backend.json").read_text())["notes"]["fp8"]
    assert "scales by row or block" in told
    rows = stored["model.language_model.layers.3.self_attn.q_proj.weight_scale"]
    assert rows[0] == "BF16"
    assert len({rows[2][i : i + 2] for i in range(0, len(rows[2]), 2)}) > 1


@needs("modelopt")
def test_a_global_scale_is_the_divisor_of_what_modelopt_multiplies(tmp_path: Path) -> None:
    """Our file and ModelOpt's own export of the same quantized model stand for the same NVFP4 weights."""
    from tests.backends.exports import modelopt_export

    out = quantized(DEMO, tmp_path / "out", "qwen-hybrid-nvfp4a16-mlp", "modelopt", None).out
    theirs = Checkpoint.open(modelopt_export(DEMO, tmp_path / "theirs"), strict=False)
    ours, others = Checkpoint.open(out), stored_modules(theirs)
    compared = 0
    for name, module in stored_modules(ours).items():
        other = others.get(name) or others.get(name.replace("model.language_model.", "model."))
        if module.scheme is None or other is None or other.scheme is None:
            continue
        mine, exported = dequantize(ours, module), dequantize(theirs, other)
        assert float((mine - exported).abs().max()) <= 1e-6 * float(exported.abs().max())
        compared += 1
    assert compared == 12


@needs("llmcompressor")
def test_a_killed_quantizer_leaves_nothing_and_the_same_command_goes_on(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = (
        "import os, signal\nfrom sparkquant.backends import llmcompressor\n"
        "llmcompressor.patterns = lambda targets: os.kill(os.getpid(), signal.SIGKILL)"
    )
    with monkeypatch.context() as broken:
        sabotaged(broken, adapter)
        with pytest.raises(Resumable, match="llm-compressor was killed by signal 9"):
            quantized(DEMO, tmp_path / "out", INT4, "llmcompressor", rows)
    assert not (tmp_path / "out").exists()
    assert quantized(DEMO, tmp_path / "out", INT4, "llmcompressor", rows).report.ok


@needs("llmcompressor")
def test_a_changed_live_model_is_what_is_quantized(rows: Path, tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3_5ForConditionalGeneration

    model = Qwen3_5ForConditionalGeneration.from_pretrained(DEMO, dtype=torch.bfloat16)
    name = "model.language_model.layers.0.mlp.down_proj"
    with torch.no_grad():
        model.get_submodule(name).weight.mul_(-1)
    given: dict[str, Any] = {"calibration": rows, "allow": ("few-tokens", "no-thinking", "truncated"), "source": DEMO}
    made = sparkquant.quantize(model, INT4, tmp_path / "out", method="llmcompressor", **given)
    result = Checkpoint.open(made.out)
    mine = dequantize(result, stored_modules(result)[name]).flatten()
    original = read_tensor(Checkpoint.open(DEMO), f"{name}.weight").float().flatten()
    assert float(torch.dot(mine, original) / (mine.norm() * original.norm())) < -0.98
