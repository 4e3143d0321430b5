"""Checkpoints with a part missing, named twice or of an odd shape are refused by the plan, each fault by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import PlanError, RecipeError, UsageError
from sparkquant.planning import make_plan, plan
from sparkquant.recipe_files import load_recipe
from tests.checkpoints import RawTensors, build

LM = "model.language_model"


def refused(folder: Path, recipe: str = "qwen-hybrid-w4a16") -> dict[str, str]:
    """Problems of the plan by place."""
    with pytest.raises(PlanError) as caught:
        make_plan(Checkpoint.open(folder), load_recipe(recipe))
    found: dict[str, str] = {}
    for problem in caught.value.problems:
        found[problem.where] = f"{found.get(problem.where, '')} {problem.what}"
    return found


def without(pattern: str) -> Callable[[dict[str, Any], RawTensors], None]:
    """A change that drops the tensors that match."""

    def change(config: dict[str, Any], tensors: RawTensors) -> None:
        found = [name for name in tensors if re.search(pattern, name)]
        assert found
        for name in found:
            del tensors[name]

    return change


def reshaped(pattern: str, shape: tuple[int, ...]) -> Callable[[dict[str, Any], RawTensors], None]:
    """A change that gives the tensors that match another shape."""

    def change(config: dict[str, Any], tensors: RawTensors) -> None:
        size = 2
        for length in shape:
            size *= length
        for name in [name for name in tensors if re.search(pattern, name)]:
            tensors[name] = ("BF16", shape, bytes(size))

    return change


@pytest.mark.parametrize(
    ("pattern", "where"),
    [
        (r"model\.embed_tokens|language_model\.embed_tokens", "embed_tokens.weight"),
        (r"language_model\.norm\.", "norm.weight"),
        (r"^lm_head", "lm_head.weight"),
        (r"language_model.*mlp\.down_proj", f"{LM}.layers.0"),
        (r"layers\.1\.mlp\.down_proj", f"{LM}.layers.1"),
        (r"layers\.3\.self_attn\.o_proj", f"{LM}.layers.3"),
        (r"layers\.2\.linear_attn\.out_proj", f"{LM}.layers.2"),
        (r"layers\.2\.linear_attn\.A_log", f"{LM}.layers.2.linear_attn.A_log"),
        (r"layers\.0\.input_layernorm", f"{LM}.layers.0.input_layernorm.weight"),
        (r"layers\.1\.mlp\.", f"{LM}.layers.1"),
        (r"layers\.1\.linear_attn\.", f"{LM}.layers.1"),
        (r"language_model\.layers\.3\.self_attn\.", f"{LM}.layers.3"),
        (r"language_model\.layers\.\d\.mlp\.", f"{LM}.layers.0"),
        (r"layers\.1\.linear_attn\.in_proj_z", f"{LM}.layers.1.linear_attn.in_proj_z.weight"),
        (r"mtp\.fc\.", "mtp.fc"),
        (r"mtp\.layers\.0\.self_attn\.o_proj", "mtp.layers.0.self_attn.o_proj"),
        (r"mtp\.layers\.0\.mlp\.", "mtp.layers.0.mlp.down_proj"),
        (r"visual\.patch_embed\.proj\.bias", "model.visual.patch_embed.proj.bias"),
        (r"visual\.merger\.linear_fc2", "model.visual.merger.linear_fc2"),
        (r"visual\.blocks\.0\.attn\.qkv\.weight", "model.visual.blocks.0.attn.qkv"),
    ],
)
def test_a_missing_tensor_is_named(pattern: str, where: str, tmp_path: Path) -> None:
    found = refused(build("qwen3_5", tmp_path / "m", change=without(pattern)))
    assert any(place.endswith(where) for place in found), found


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("intermediate_size", 640, "mlp.gate_proj.weight"),
        ("num_key_value_heads", 2, "self_attn.k_proj.weight"),
        ("head_dim", 64, "self_attn.q_proj.weight"),
        ("vocab_size", 1024, "embed_tokens.weight"),
        ("linear_num_value_heads", 3, "linear_attn.in_proj_z.weight"),
        ("linear_value_head_dim", 64, "linear_attn.out_proj.weight"),
    ],
)
def test_a_width_of_the_config_that_no_weight_has_is_named(field: str, value: int, place: str, tmp_path: Path) -> None:
    def change(config: dict[str, Any], _: RawTensors) -> None:
        assert config["text_config"][field] != value
        config["text_config"][field] = value

    found = refused(build("qwen3_5", tmp_path / "m", change=change))
    assert any(name.endswith(place) and f"{field} {value}" in what for name, what in found.items()), found


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Lfm2ForCausalLM", "a class of lfm2"),
        ("Qwen3NextForCausalLM", "a class of qwen3_next"),
        ("Qwen3_5MoeForConditionalGeneration", "a class of qwen3_5_moe"),
        ("LlamaForCausalLM", "no class that loads this family"),
    ],
)
def test_a_class_of_another_family_is_refused(name: str, what: str, tmp_path: Path) -> None:
    folder = build("qwen3_5", tmp_path / "m", change=lambda config, _: config.update(architectures=[name]))
    assert what in refused(folder)["config.json"]
    own_code = {"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoModelForCausalLM": "m.LlamaForCausalLM"}}
    own = build("qwen3_5", tmp_path / "own", change=lambda config, _: config.update(own_code))
    assert make_plan(Checkpoint.open(own), load_recipe("qwen-hybrid-w4a16")).decisions


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "names the kinds of 3 layers, num_hidden_layers is 4"),
        ({"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "is 'full_attention' by config.json"),
        ({"layer_types": None, "full_attention_interval": 2}, "is 'full_attention' by config.json"),
    ],
)
def test_kinds_of_layers_are_those_of_the_config(fields: dict[str, Any], what: str, tmp_path: Path) -> None:
    def change(config: dict[str, Any], _: RawTensors) -> None:
        text = config["text_config"]
        text.update(fields)
        for key in [key for key, value in fields.items() if value is None]:
            del text[key]

    assert any(what in fault for fault in refused(build("qwen3_5", tmp_path / "m", change=change)).values())


def test_a_text_class_beside_a_tower_is_refused(tmp_path: Path) -> None:
    folder = build("qwen3_5", tmp_path / "m", change=lambda config, _: config.update(architectures=[TEXT_CLASS]))
    assert "a text-only class, yet vision tensors are stored" in refused(folder)["config.json"]


TEXT_CLASS = "Qwen3_5ForCausalLM"


def test_weights_in_the_vendors_own_form_are_left_aside(tmp_path: Path) -> None:
    for shards in (1, 2):
        folder = build("qwen3_5", tmp_path / f"m{shards}", shards=shards)
        first = next(iter(folder.glob("*.safetensors")))
        (folder / "consolidated.safetensors").write_bytes(first.read_bytes())
        (folder / "consolidated-00001-of-00002.safetensors").write_bytes(first.read_bytes())
        checkpoint = Checkpoint.open(folder)
        assert not any("consolidated" in header.shard for header in checkpoint.tensors.values())
        assert not any("consolidated" in name for name in checkpoint.side_files())


def test_a_draft_head_that_the_config_denies_is_noted(tmp_path: Path) -> None:
    folder = build("qwen3_5", tmp_path / "m", change=lambda c, _: c["text_config"].update(mtp_num_hidden_layers=0))
    notes = make_plan(Checkpoint.open(folder), load_recipe("qwen-hybrid-w4a16")).notes
    assert any("config.json says that there is none (mtp_num_hidden_layers)" in note for note in notes)


def test_a_tower_that_is_not_stored_is_noted(tmp_path: Path) -> None:
    folder = build("qwen3_5", tmp_path / "m", change=without(r"model\.visual"))
    notes = make_plan(Checkpoint.open(folder), load_recipe("qwen-hybrid-w4a16")).notes
    assert any("declares a vision tower, but the checkpoint has none" in note for note in notes)


def test_a_vision_tower_needs_its_config(tmp_path: Path) -> None:
    folder = build("qwen3_5", tmp_path / "m", change=lambda config, _: config.pop("vision_config"))
    assert any("vision_config" in what for what in refused(folder).values())


def test_an_expert_that_one_layer_lacks_is_named(tmp_path: Path) -> None:
    folder = build("qwen3_next", tmp_path / "m", change=without(r"layers\.1\.mlp\.experts\.3\."))
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in refused(folder)


def test_a_tied_head_may_be_absent(tmp_path: Path) -> None:
    folder = build("qwen3_5", tmp_path / "m", tied=True)
    assert make_plan(Checkpoint.open(folder), load_recipe("qwen-hybrid-w4a16")).decisions


@pytest.mark.parametrize(
    ("pattern", "shape", "what"),
    [
        (r"model\.layers\.1\.mlp\.down_proj|language_model\.layers\.1\.mlp\.down_proj", (256, 384), "is [256, 384]"),
        (r"language_model\.layers\.\d\.mlp\.down_proj", (128, 512), "hidden_size 256"),
        (r"language_model\.embed_tokens", (512, 128), "hidden_size 256"),
        (r"language_model\.layers\.1\.mlp\.gate_proj", (0, 256), "holds nothing"),
        (r"language_model\.layers\.1\.mlp\.gate_proj", (512, 16, 16), "two dimensions"),
    ],
)
def test_a_shape_that_cannot_be_is_named(pattern: str, shape: tuple[int, ...], what: str, tmp_path: Path) -> None:
    found = refused(build("qwen3_5", tmp_path / "m", change=reshaped(pattern, shape)))
    assert any(what in fault and re.search(pattern, place) for place, fault in found.items()), found


def test_a_layer_number_with_leading_zeros_is_refused(tmp_path: Path) -> None:
    def twice(config: dict[str, Any], tensors: RawTensors) -> None:
        name = f"{LM}.layers.1.mlp.down_proj.weight"
        tensors[name.replace(".1.", ".01.")] = tensors[name]

    found = refused(build("qwen3_5", tmp_path / "m", change=twice))
    assert "leading zeros" in found[f"{LM}.layers.01.mlp.down_proj.weight"]


def test_missing_architectures_are_noted(tmp_path: Path) -> None:
    folder = build("qwen3_5_text", tmp_path / "m", change=lambda config, _: config.pop("architectures"))
    assert any("architectures" in note for note in plan(folder).notes)


@pytest.mark.parametrize("value", ["Qwen3_5ForCausalLM", [], ["A", "B"], [3], ["rm -rf"]])
def test_architectures_that_name_no_class_are_refused(value: Any, tmp_path: Path) -> None:
    folder = build("qwen3_5", tmp_path / "m", change=lambda config, _: config.update(architectures=value))
    assert "architectures" in refused(folder)["config.json"]


@pytest.mark.parametrize("options", [{"tp": "1,2"}, {"tp": 2}, {"tp": None}, {"shard_bytes": "5GB"}, {"tp": (1.5,)}])
def test_arguments_of_another_type_are_usage_errors(options: dict[str, Any], tmp_path: Path) -> None:
    folder = build("qwen3_5_text", tmp_path / "m")
    with pytest.raises(UsageError):
        plan(folder, **options)


@pytest.mark.parametrize("recipe", [None, ["a"], 3])
def test_a_recipe_of_another_type_is_a_recipe_error(recipe: Any) -> None:
    with pytest.raises(RecipeError):
        load_recipe(recipe)


def test_explaining_nothing_is_a_usage_error(tmp_path: Path) -> None:
    made = plan(build("qwen3_5_text", tmp_path / "m"))
    with pytest.raises(UsageError):
        made.explain(None)  # type: ignore[arg-type]


def test_a_tensor_parallel_size_that_does_not_divide_is_no_matter_of_schemes(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        plan(build("qwen3_5_text", tmp_path / "m"), tp=(3,))
    (problem,) = caught.value.problems
    assert problem.where == "config.json"
    assert problem.hint == "of 1, 2, 4, 8, 16 these fit: 1, 2"
