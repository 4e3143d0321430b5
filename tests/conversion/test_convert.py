"""`convert`: every producer's checkpoint said again without rounding, mended from its source, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sparkquant
from sparkquant import evidence
from sparkquant.checkpoint import Checkpoint
from sparkquant.conversion import Converted
from sparkquant.errors import CheckFailed, CheckpointError, UsageError
from sparkquant.formats import dequantize, stored_modules
from sparkquant.restatement import divisor_of
from tests.checkpoints import RawTensors, build, read_raw, write_json, write_shards
from tests.cli.running import DEMO, invoke
from tests.execution.folders import digests
from tests.verification.producers import PRODUCERS, Made, produce, rewrite

Edit = Callable[[dict[str, Any], RawTensors], None]


def edited(folder: Path, edit: Edit) -> Path:
    """Change config and tensors of a finished checkpoint."""
    config, tensors = json.loads((folder / "config.json").read_text()), read_raw(folder)
    edit(config, tensors)
    rewrite(folder, tensors)
    write_json(folder / "config.json", config)
    return folder


def converted(made: Made, out: Path, *, source: bool = True) -> Converted:
    return sparkquant.convert(made.out, out, source=made.source if source else None)


def is_good(out: Path, source: Path) -> None:
    report = sparkquant.verify(out, source=source, level="deep")
    assert report.ok, [(check.id, check.message) for check in report.failed]


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_checkpoint_of_every_producer_stands_for_the_same_weights(producer: str, tmp_path: Path) -> None:
    made = produce(tmp_path, producer)
    done = converted(made, tmp_path / "converted")
    is_good(done.out, made.source)
    result = Checkpoint.open(done.out)
    modules = stored_modules(result)
    before = read_raw(made.out)
    for name, weight in made.weights.items():
        found = dequantize(result, modules[name]).double().numpy()
        assert np.abs(found - weight).max() <= 3e-7 * np.abs(weight).max()
    kept = {name: value for name, value in before.items() if name.rpartition(".")[0] not in made.weights}
    assert {name: value for name, value in read_raw(done.out).items() if name in kept} == kept
    config = json.loads((done.out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert any("said as compressed-tensors: 25 modules" in change for change in done.changes)
    record = json.loads((done.out / "sparkquant" / "conversion.json").read_text())
    assert record["changes"] == list(done.changes)


@pytest.mark.parametrize("producer", ["gptq", "awq", "fp8 block", "gptq 8 bits, plain order"])
def test_codes_are_moved_and_never_made_again(producer: str, tmp_path: Path) -> None:
    """Not a bit of the float32 weights changes where no global scale is turned over."""
    made = produce(tmp_path, producer)
    before, after = Checkpoint.open(made.out), Checkpoint.open(converted(made, tmp_path / "c").out)
    old, new = stored_modules(before), stored_modules(after)
    for name in made.weights:
        assert torch.equal(dequantize(before, old[name]), dequantize(after, new[name]))


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next"])
def test_experts_are_converted_one_by_one(kind: str, tmp_path: Path) -> None:
    made = produce(tmp_path, "gptq", kind, fused_experts=False)
    done = converted(made, tmp_path / "c")
    is_good(done.out, made.source)


def _lose(*prefixes: str) -> Edit:
    def edit(config: dict[str, Any], tensors: RawTensors) -> None:
        for name in [name for name in tensors if name.startswith(prefixes)]:
            del tensors[name]

    return edit


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        (("mtp.",), "15 tensors of mtp taken from the source"),
        (("model.visual.",), "tensors of vision taken from the source"),
        (("model.language_model.layers.0.linear_attn.conv1d",), "1 tensors of linear_attention.conv taken"),
        (("lm_head.",), "1 tensors of lm_head taken from the source"),
        (("model.language_model.norm", "mtp.fc"), "1 tensors of norm taken from the source"),
    ],
)
def test_what_was_lost_is_taken_from_the_source_byte_for_byte(lost: tuple[str, ...], told: str, tmp_path: Path) -> None:
    made = produce(tmp_path, "auto-round")
    edited(made.out, _lose(*lost))
    done = converted(made, tmp_path / "c")
    is_good(done.out, made.source)
    assert any(told in change for change in done.changes), done.changes
    source, result = read_raw(made.source), read_raw(done.out)
    grafted = [name for name in source if name.startswith(lost)]
    assert grafted
    assert all(result[name] == source[name] for name in grafted)


def test_without_the_source_a_lost_draft_head_is_refused_with_the_way_out(tmp_path: Path) -> None:
    made = produce(tmp_path, "modelopt w4a16 nvfp4")
    edited(made.out, _lose("mtp."))
    with pytest.raises(CheckFailed) as raised:
        converted(made, tmp_path / "c", source=False)
    assert [problem.where for problem in raised.value.problems] == ["mtp.missing"]
    assert raised.value.hint.startswith("pass --source")
    assert not (tmp_path / "c").exists()


def test_a_lost_decoder_weight_cannot_be_mended(tmp_path: Path) -> None:
    made = produce(tmp_path, "gptq")
    module = "model.language_model.layers.1.mlp.down_proj"
    edited(made.out, _lose(module))
    with pytest.raises(CheckpointError, match="decoder weights are missing") as raised:
        converted(made, tmp_path / "c")
    assert [problem.where for problem in raised.value.problems] == [f"{module}.weight"]


def test_cast_state_is_in_the_dtype_of_the_source_again(tmp_path: Path) -> None:
    made = produce(tmp_path, "gptq", float32_state=True)

    def cast(config: dict[str, Any], tensors: RawTensors) -> None:
        for name, (dtype, shape, raw) in tensors.items():
            if dtype == "F32" and name.endswith("A_log"):
                value = torch.frombuffer(bytearray(raw), dtype=torch.float32).bfloat16()
                tensors[name] = ("BF16", shape, value.view(torch.uint8).numpy().tobytes())

    edited(made.out, cast)
    done = converted(made, tmp_path / "c")
    is_good(done.out, made.source)
    assert any(change.startswith("3 tensors in the source's dtype again") for change in done.changes)
    assert read_raw(done.out)["model.language_model.layers.0.linear_attn.A_log"][0] == "F32"


def test_tensors_that_the_producer_changed_stay_and_are_named(tmp_path: Path) -> None:
    """AWQ rescales norms: without them its codes would mean something else."""
    made = produce(tmp_path, "awq")
    name = "model.language_model.layers.0.post_attention_layernorm.weight"

    def smooth(config: dict[str, Any], tensors: RawTensors) -> None:
        dtype, shape, raw = tensors[name]
        tensors[name] = (dtype, shape, raw[:-2] + b"\x00\x3f")

    edited(made.out, _lose("mtp."))
    edited(made.out, smooth)
    done = converted(made, tmp_path / "c")
    assert any("1 kept tensors differ from the source and stay" in change and name in change for change in done.changes)
    assert read_raw(done.out)[name] == read_raw(made.out)[name]
    failed = {check.id for check in sparkquant.verify(done.out, source=made.source).failed}
    assert failed == {"source.bytes"}


def test_a_text_only_export_gets_the_names_and_the_tower_of_its_source_back(tmp_path: Path) -> None:
    made = produce(tmp_path, "gptq")

    def text_only(config: dict[str, Any], tensors: RawTensors) -> None:
        text = config.pop("text_config")
        block = config["quantization_config"]
        config.clear()
        config.update(text, architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", quantization_config=block)
        for name in list(tensors):
            value = tensors.pop(name)
            if not name.startswith(("model.visual.", "mtp.")):
                tensors[name.replace("model.language_model.", "model.")] = value

    edited(made.out, text_only)
    done = converted(made, tmp_path / "c")
    is_good(done.out, made.source)
    assert any("modules renamed as the source has them" in change for change in done.changes)
    assert any("config.json is the source's again" in change for change in done.changes)
    assert json.loads((done.out / "config.json").read_text())["architectures"] == ["Qwen3_5ForConditionalGeneration"]


def test_side_files_come_back_and_old_configs_go(tmp_path: Path) -> None:
    made = produce(tmp_path, "modelopt fp8")
    (made.out / "chat_template.jinja").unlink()
    (made.out / "tokenizer_config.json").write_text("{}")
    write_json(made.out / "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})
    done = converted(made, tmp_path / "c")
    is_good(done.out, made.source)
    assert not (done.out / "hf_quant_config.json").exists()
    assert (done.out / "chat_template.jinja").read_bytes() == (made.source / "chat_template.jinja").read_bytes()
    assert "1 side files taken from the source: chat_template.jinja" in done.changes
    assert "1 side files are the source's again: tokenizer_config.json" in done.changes


def test_an_index_that_lies_is_rebuilt(tmp_path: Path) -> None:
    made = produce(tmp_path, "gptq")
    tensors = read_raw(made.out)
    for old in [*made.out.glob("*.safetensors"), *made.out.glob("*.index.json")]:
        old.unlink()
    write_shards(made.out, tensors, shards=2)
    index = json.loads((made.out / "model.safetensors.index.json").read_text())
    del index["weight_map"]["lm_head.weight"]
    write_json(made.out / "model.safetensors.index.json", index)
    done = converted(made, tmp_path / "c")
    is_good(done.out, made.source)
    assert any(change.startswith("index rebuilt: 1 places") for change in done.changes)


def test_a_4_bit_draft_head_is_replaced_and_an_ignored_tower_listed(tmp_path: Path) -> None:
    """AutoRound's own defaults: int4 in the draft head, and a compressed-tensors config that forgets to ignore."""
    made = produce(tmp_path, "auto-round")
    weight = "mtp.layers.0.mlp.down_proj"

    def coarse(config: dict[str, Any], tensors: RawTensors) -> None:
        donor = "model.language_model.layers.0.mlp.down_proj"
        for suffix in ("qweight", "qzeros", "scales"):
            tensors[f"{weight}.{suffix}"] = tensors[f"{donor}.{suffix}"]
        del tensors[f"{weight}.weight"]
        config["quantization_config"]["block_name_to_quantize"] += ", mtp.layers"

    edited(made.out, coarse)
    done = converted(made, tmp_path / "c")
    is_good(done.out, made.source)
    assert f"draft head below 8 bits replaced by the source's: {weight}" in done.changes
    assert read_raw(done.out)[f"{weight}.weight"] == read_raw(made.source)[f"{weight}.weight"]


def test_an_incomplete_ignore_list_is_completed_and_nothing_else_changes(tmp_path: Path) -> None:
    source = build("qwen3_5", tmp_path / "m")
    good = sparkquant.quantize(source, "qwen-hybrid-w4a16", tmp_path / "good", method="rtn").out
    bad = shutil.copytree(good, tmp_path / "bad")
    shutil.rmtree(bad / "sparkquant")
    config = json.loads((bad / "config.json").read_text())
    whole = config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = [entry for entry in whole if "mtp" not in entry and "visual" not in entry]
    write_json(bad / "config.json", config)
    done = sparkquant.convert(bad, tmp_path / "c", source=source)
    assert json.loads((done.out / "config.json").read_text())["quantization_config"]["ignore"] == whole
    assert read_raw(done.out) == read_raw(good)
    assert len(done.changes) == 1
    assert done.changes[0].startswith("ignore list and targets written anew")


def test_a_good_result_of_this_project_is_converted_without_a_change(tmp_path: Path) -> None:
    source = build("qwen3_5", tmp_path / "m")
    good = sparkquant.quantize(source, "qwen-hybrid-nvfp4-fp8", tmp_path / "good", method="rtn").out
    done = sparkquant.convert(good, tmp_path / "c", source=source)
    assert done.changes == ()
    assert read_raw(done.out) == read_raw(good)
    assert json.loads((done.out / "config.json").read_text()) == json.loads((good / "config.json").read_text())


def _order(config: dict[str, Any], tensors: RawTensors) -> None:
    name = "model.language_model.layers.0.mlp.down_proj"
    k = tensors[f"{name}.qweight"][1][0] * 8
    index = np.random.default_rng(0).permutation(np.arange(k) // 128).astype("<i4")
    tensors[f"{name}.g_idx"] = ("I32", (k,), index.tobytes())


def _zero_points(config: dict[str, Any], tensors: RawTensors) -> None:
    name = "model.language_model.layers.0.mlp.down_proj.qzeros"
    dtype, shape, raw = tensors[name]
    tensors[name] = (dtype, shape, b"\xff" * len(raw))


def _gates(config: dict[str, Any], tensors: RawTensors) -> None:
    gate = "model.language_model.layers.0.linear_attn.in_proj_a"
    del tensors[f"{gate}.weight"]
    tensors[f"{gate}.qweight"] = ("I32", (32, 8), bytes(4 * 32 * 8))
    tensors[f"{gate}.qzeros"] = ("I32", (2, 1), bytes.fromhex("77777777") * 2)
    tensors[f"{gate}.scales"] = ("F16", (2, 8), b"\x00\x1c" * 16)


@pytest.mark.parametrize(
    ("edit", "where"),
    [(_order, "down_proj.g_idx"), (_zero_points, "down_proj.qzeros")],
)
def test_what_cannot_be_said_without_rounding_is_refused(edit: Edit, where: str, tmp_path: Path) -> None:
    made = produce(tmp_path, "gptq")
    edited(made.out, edit)
    with pytest.raises(CheckpointError, match="without changing numbers") as raised:
        converted(made, tmp_path / "c")
    assert [problem.where.endswith(where) for problem in raised.value.problems] == [True]
    assert not (tmp_path / "c").exists()


def test_quantized_gates_are_refused_because_mending_them_changes_answers(tmp_path: Path) -> None:
    made = produce(tmp_path, "gptq")
    edited(made.out, _gates)
    with pytest.raises(CheckpointError, match="without changing numbers") as raised:
        converted(made, tmp_path / "c")
    (problem,) = raised.value.problems
    assert problem.where.endswith("in_proj_a")
    assert "recurrence control" in problem.what


def test_unequal_global_scales_are_refused(tmp_path: Path) -> None:
    made = produce(tmp_path, "modelopt w4a16 nvfp4")
    name = "model.language_model.layers.0.mlp.up_proj.weight_scale_2"

    def change(config: dict[str, Any], tensors: RawTensors) -> None:
        dtype, shape, raw = tensors[name]
        value = np.frombuffer(raw, "<f4") * np.float32(1.5)
        tensors[name] = (dtype, shape, value.astype("<f4").tobytes())

    edited(made.out, change)
    with pytest.raises(CheckFailed) as raised:
        converted(made, tmp_path / "c")
    assert "scales.global" in [problem.where for problem in raised.value.problems]


def test_a_16_bit_checkpoint_and_a_quantized_source_are_usage_errors(tmp_path: Path) -> None:
    made = produce(tmp_path, "gptq")
    with pytest.raises(CheckpointError, match="no quantized checkpoint"):
        sparkquant.convert(made.source, tmp_path / "c")
    with pytest.raises(UsageError, match="is quantized itself"):
        sparkquant.convert(made.out, tmp_path / "c", source=made.out)
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        sparkquant.convert(made.out, tmp_path / "taken", source=made.source)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    made = produce(tmp_path, "modelopt mixed")
    assert digests(converted(made, tmp_path / "a").out) == digests(converted(made, tmp_path / "b").out)


def test_evidence_of_the_conversion_belongs_to_the_result(tmp_path: Path) -> None:
    made = produce(tmp_path, "gptq")
    done = converted(made, tmp_path / "c")
    found = evidence.read(done.out)
    assert {verb for verb, record in found.items() if record.green} >= {"verify"}
    assert found["convert"].freshness is evidence.Freshness.FRESH
    assert found["convert"].result["changes"] == list(done.changes)


def test_an_interrupted_run_of_another_job_is_kept_until_it_is_discarded(tmp_path: Path) -> None:
    made = produce(tmp_path, "modelopt w4a16 nvfp4")
    edited(made.out, _lose("mtp."))
    with pytest.raises(CheckFailed):
        converted(made, tmp_path / "c", source=False)
    with pytest.raises(UsageError, match="belongs to another job"):
        converted(made, tmp_path / "c")
    is_good(sparkquant.convert(made.out, tmp_path / "c", source=made.source, restart=True).out, made.source)


def test_a_divisor_is_the_exact_inverse_wherever_float32_has_one() -> None:
    multipliers = torch.rand(4000, generator=torch.Generator().manual_seed(3)) * 10 + 1e-6
    found = torch.cat([divisor_of(value) for value in multipliers])
    exact = 1 / found == multipliers
    for value in multipliers[~exact][:50]:
        near = 1 / value
        around = [near]
        for _ in range(4):
            around = [torch.nextafter(around[0], near * 0), *around, torch.nextafter(around[-1], near * 2)]
        assert not any(bool(1 / d == value) for d in around)
    assert float(exact.float().mean()) > 0.5
    assert float(((1 / found - multipliers) / multipliers).abs().max()) < 2**-22


def test_the_command_says_each_change_and_speaks_json(tmp_path: Path) -> None:
    made = produce(tmp_path, "gptq")
    edited(made.out, _lose("mtp."))
    result = invoke("convert", made.out, "-o", tmp_path / "c", "--source", made.source)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("15 tensors of mtp taken from the source: mtp.fc.weight")
    assert lines[1] == "gptq said as compressed-tensors: 25 modules, w4a16 g128"
    assert lines[-1].endswith("skipped")
    document = json.loads(invoke("convert", made.out, "-o", tmp_path / "d", "--source", made.source, "--json").stdout)
    assert document["changes"] == lines[:2]
    refused = invoke("convert", made.out, "-o", tmp_path / "e")
    assert refused.exit_code == 4
    assert "pass --source" in refused.stderr
    assert invoke("convert", DEMO, "-o", tmp_path / "f").exit_code == 3
