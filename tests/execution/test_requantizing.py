"""Sources that are quantized already: read exactly, never below 8 bits unasked, and nothing of the old config stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sparkquant
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError, QuantizedSource
from sparkquant.execute import quantize
from sparkquant.planning import make_plan, plan
from sparkquant.recipe_files import load_recipe
from sparkquant.requantizing import as_16_bit
from sparkquant.verification.gate import verify
from tests.checkpoints import build, read_raw, write_json
from tests.cli.running import invoke
from tests.verification.producers import PRODUCERS, produce, rewrite

L0 = "model.language_model.layers.0."
DOWN = f"{L0}mlp.down_proj"


def bfloat16(weight: Any) -> bytes:
    raw = torch.from_numpy(weight).float().to(torch.bfloat16).contiguous()
    return raw.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("producer", PRODUCERS)
def test_the_result_is_made_from_the_exact_weights(producer: str, tmp_path: Path) -> None:
    """As from a float32 source that holds what the quantized one stands for."""
    made = produce(tmp_path, producer, layers=1)
    wide = build("qwen3_5", tmp_path / "wide", layers=1)
    tensors = read_raw(made.source)
    for module, weight in made.weights.items():
        tensors[f"{module}.weight"] = ("F32", weight.shape, weight.astype("<f4").tobytes())
    rewrite(wide, tensors)
    got = quantize(made.out, "qwen-hybrid-fp8", tmp_path / "got", method="rtn")
    wanted = quantize(wide, "qwen-hybrid-fp8", tmp_path / "wanted", method="rtn")
    mine, theirs = read_raw(got.out), read_raw(wanted.out)
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if mine[name] != theirs[name]]
    for name in different:  # float32 products may differ in the last bit, which moves a code at a rounding edge
        ours, other = (np.frombuffer(found[name][2], dtype=np.uint8).astype(int) for found in (mine, theirs))
        assert (ours != other).mean() < 1e-3, name
    config = json.loads((got.out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert got.plan.source["quantized"]["method"]
    assert "allowed_below_8_bits" not in got.plan.source["quantized"]


@pytest.mark.parametrize("producer", ["fp8 block", "fp8 tensor", "modelopt w4a16 nvfp4", "gptq"])
def test_below_8_bits_has_to_be_allowed(producer: str, tmp_path: Path) -> None:
    made = produce(tmp_path, producer)
    with pytest.raises(QuantizedSource, match="fewer than 8 bits") as caught:
        quantize(made.out, "qwen-hybrid-nvfp4a16-mlp", tmp_path / "new")
    assert "--allow-requantize" in caught.value.hint
    assert not (tmp_path / "new").exists()
    done = quantize(made.out, "qwen-hybrid-nvfp4a16-mlp", tmp_path / "new", method="rtn", allow_requantize=True)
    assert done.report.ok
    assert done.plan.source["quantized"]["allowed_below_8_bits"] == 12
    assert any("rounded twice: 12 tensors" in note for note in done.plan.notes)
    kept = [name for name in made.weights if ".mlp." not in name]
    stored = read_raw(done.out)
    assert len(kept) == 13
    for name in kept:
        assert stored[f"{name}.weight"] == ("BF16", made.weights[name].shape, bfloat16(made.weights[name]))
    assert any("written as BF16" in note for note in done.plan.notes)
    assert "written as BF16" in done.plan.decisions[f"{kept[0]}.weight"].because
    assert "quantized again" in done.plan.decisions[f"{DOWN}.weight"].because
    assert verify(done.out, source=made.out, level="deep").ok
    other = verify(done.out, source=made.source, level="headers")
    assert {check.id for check in other.failed} == {"plan.source"}
    original = read_raw(made.out)
    assert stored["mtp.fc.weight"] == original["mtp.fc.weight"]


def test_a_changed_kept_tensor_is_found(tmp_path: Path) -> None:
    made = produce(tmp_path, "fp8 block", layers=1)
    done = quantize(made.out, "qwen-hybrid-nvfp4a16-mlp", tmp_path / "new", method="rtn", allow_requantize=True)
    tensors = read_raw(done.out)
    name = f"{L0}linear_attn.out_proj.weight"
    dtype, shape, raw = tensors[name]
    rewrite(done.out, tensors | {name: (dtype, shape, b"\x01\x02" + raw[2:])})
    assert {check.id for check in verify(done.out, source=made.out).failed} == {"source.bytes"}


@pytest.mark.parametrize("producer", ["fp8 block", "modelopt w4a16 nvfp4", "gptq", "awq", "auto-round", "fp8 tensor"])
def test_a_missing_scale_is_named(producer: str, tmp_path: Path) -> None:
    made = produce(tmp_path, producer, layers=1)
    tensors = read_raw(made.out)
    for suffix in ("weight_scale", "weight_scale_inv", "weight_scale_2", "scales", "qzeros"):
        lost = f"{DOWN}.{suffix}"
        if lost not in tensors:
            continue
        rewrite(made.out, {name: value for name, value in tensors.items() if name != lost})
        with pytest.raises(CheckpointError) as caught:
            plan(made.out, "qwen-hybrid-fp8")
        assert lost in str(caught.value)
        assert "is missing" in str(caught.value)


def test_nothing_of_the_old_config_survives(tmp_path: Path) -> None:
    made = produce(tmp_path, "modelopt w4a16 nvfp4", layers=1)
    said = {"quantization": {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": "FP8"}}
    write_json(made.out / "hf_quant_config.json", said)
    write_json(made.out / "quantize_config.json", {"bits": 4})
    tensors = read_raw(made.out)
    tensors[f"{L0}self_attn.k_proj.k_scale"] = ("F32", (), b"\0\0\x80\x3f")
    rewrite(made.out, tensors)
    done = sparkquant.quantize(made.out, "qwen-hybrid-fp8", tmp_path / "new", method="rtn")
    names = {path.name for path in done.out.rglob("*")}
    assert not names & {"hf_quant_config.json", "quantize_config.json"}
    assert "modelopt" not in (done.out / "config.json").read_text()
    assert not any("k_scale" in name for name in read_raw(done.out))
    assert any("KV cache" in note for note in done.plan.notes)


def test_our_own_result_is_a_source_too(tmp_path: Path) -> None:
    source = build("qwen3_5", tmp_path / "source", layers=1)
    quantize(source, "qwen-hybrid-fp8", tmp_path / "eight", method="rtn")
    again = quantize(tmp_path / "eight", "qwen-hybrid-fp8", tmp_path / "again", method="rtn")
    assert again.report.ok
    assert again.plan.source["quantized"]["method"] == "compressed-tensors"
    with pytest.raises(QuantizedSource):
        quantize(tmp_path / "eight", "qwen-hybrid-w4a16", tmp_path / "four")


def test_the_view_is_planned_like_the_original(tmp_path: Path) -> None:
    made = produce(tmp_path, "fp8 block")
    recipe = load_recipe("qwen-hybrid-w4a16")
    seen = make_plan(as_16_bit(Checkpoint.open(made.out)), recipe, allow_requantize=True)
    original = make_plan(Checkpoint.open(made.source), recipe)
    assert {n: d.outputs for n, d in seen.decisions.items()} == {n: d.outputs for n, d in original.decisions.items()}
    assert seen.source["headers"] == Checkpoint.open(made.out).header_digest
    assert seen.to_json() == plan(made.out, recipe, allow_requantize=True).to_json()


def test_the_command_line_asks(tmp_path: Path) -> None:
    made = produce(tmp_path, "fp8 block", layers=1)
    refused = invoke("plan", made.out)
    assert refused.exit_code == 3
    assert "--allow-requantize" in refused.stderr
    allowed = invoke("plan", made.out, "--allow-requantize")
    assert allowed.exit_code == 0
    assert "rounded twice" in " ".join(allowed.stdout.split())
    done = invoke("quantize", made.out, "-o", tmp_path / "new", "--method", "rtn", "--allow-requantize")
    assert done.exit_code == 0
