"""Whole checkpoints of every family have no fault, and none that has lost a tensor, a part or a width is planned."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkquant.checkpoint import Checkpoint
from sparkquant.layers import Layout, classify
from sparkquant.layouts import families_of, family_names, layout_for
from sparkquant.structure import structure_faults
from sparkquant.verification.gate import verify
from tests.families.builders import build
from tests.families.configs import CASES, family_of
from tests.families.published import PUBLISHED
from tests.families.shapes import shapes_of

Family = Callable[[str], Path]

ALONE = re.compile(
    # Parts that these small models have once, so that no other layer tells what belongs to them.
    r".*(?:[qk]_norm|[qk]_layernorm|kv_a_layernorm|kv_a_proj_with_mqa|kv_b_proj|q_a_layernorm|q_b_proj)\.weight"
    r"|.*(?:e_score_correction_bias|latent_proj\.weight|decay|slope_rate|output_gate\.weight|qkv_proj\.weight)"
    r"|.*(?:indexer|ple|hyper_connection_mixer|shared_transformer|vision_tower|mamba_decoder|visual)\..*"
    r"|.*(?:self_attn\.norm|\.linear)\.weight|.*o_proj\.bias"
    r"|.*(?:(?:channel|temporal)_pre_norm|(?:post_)?feedforward_layer_?norm|attention_layer_norm)\.weight"
    # Copies of embedding and head that only some releases store with their draft layer.
    r"|.*layers\.\d+\.(?:embed_tokens|shared_head\.head)\.weight"
)


def _opened(case: str, family: Family) -> tuple[Checkpoint, Layout]:
    checkpoint = Checkpoint.open(family(case))
    return checkpoint, layout_for(checkpoint.config)


def _faults(checkpoint: Checkpoint, layout: Layout, tensors: dict[str, Any], **config: Any) -> list[str]:
    whole = SimpleNamespace(config=checkpoint.config | config, text_config=checkpoint.text_config, tensors=tensors)
    return [str(fault) for fault in structure_faults(whole, layout, classify(layout, tensors))]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_a_whole_checkpoint_has_no_fault(case: str, family: Family) -> None:
    checkpoint, layout = _opened(case, family)
    assert _faults(checkpoint, layout, dict(checkpoint.tensors)) == []


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("granitemoehybrid", {"mamba": "linear_attention", "attention": "full_attention"}),
        ("granitemoehybrid dense", {"mamba": "linear_attention", "attention": "full_attention"}),
        ("zamba2", {"mamba": "linear_attention", "hybrid": "hybrid"}),
        ("lfm2", {"conv": "linear_attention", "full_attention": "full_attention"}),
        ("recurrent_gemma", {"recurrent": "linear_attention", "attention": "full_attention"}),
    ],
)
def test_kinds_may_be_named_as_newer_libraries_do(case: str, names: dict[str, str], family: Family) -> None:
    checkpoint, layout = _opened(case, family)
    key = next(key for key in ("layer_types", "layers_block_type", "block_types") if key in checkpoint.config)
    kinds = [names[kind] for kind in checkpoint.config[key]]
    text = {**checkpoint.config, "layer_types": kinds}
    whole = SimpleNamespace(config=text, text_config=text, tensors=checkpoint.tensors)
    faults = structure_faults(whole, layout, classify(layout, checkpoint.tensors))  # type: ignore[arg-type]
    assert [str(fault) for fault in faults] == []


def _more_layers(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """RecurrentGemma: the pattern of three kinds goes on."""
    config["num_hidden_layers"] = 5
    for name in list(tensors):
        for old, new in ((0, 3), (1, 4)):
            if f".layers.{old}." in name:
                tensors[name.replace(f".layers.{old}.", f".layers.{new}.")] = tensors[name]


def _indices_alone(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Zamba2 as it was first published: no list of kinds."""
    del config["layers_block_type"]


def _shared_indexers(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """GLM: every second layer uses the indexer of the one before, and so does the draft layer."""
    config["indexer_types"] = ["full", "shared"]
    for name in [name for name in tensors if ".indexer." in name and ".layers.0." not in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("case", "change"),
    [("recurrent_gemma", _more_layers), ("zamba2", _indices_alone), ("glm_moe_dsa", _shared_indexers)],
)
def test_forms_that_are_published_too_are_whole(
    case: str, change: Callable[[dict[str, Any], dict[str, Any]], None], tmp_path: Path
) -> None:
    folder = build(case, tmp_path / "m", change=change)
    checkpoint = Checkpoint.open(folder)
    layout = layout_for(checkpoint.config)
    assert _faults(checkpoint, layout, dict(checkpoint.tensors)) == []
    assert "tensors.layers" not in {check.id for check in verify(folder, level="headers").failed}


@pytest.mark.parametrize("case", ["qwen4_exp", "olmo_hybrid", "minimax", "bamba"])
def test_a_layer_of_another_kind_than_declared_is_named(case: str, family: Family) -> None:
    checkpoint, layout = _opened(case, family)
    count = checkpoint.text_config["num_hidden_layers"]
    for kind in ("full_attention", "linear_attention"):
        text = {**checkpoint.text_config, "layer_types": [kind] * count}
        whole = SimpleNamespace(config=text, text_config=text, tensors=checkpoint.tensors)
        faults = structure_faults(whole, layout, classify(layout, checkpoint.tensors))  # type: ignore[arg-type]
        assert any(f"is {kind!r} by config.json" in str(fault) for fault in faults)


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 2}),
        ("deepseek_v3", {"first_k_dense_replace": 0}),
        ("kimi_linear", {"first_k_dense_replace": 2}),
        ("glm_moe_dsa", {"mlp_layer_types": ["sparse", "dense"]}),
        ("lfm2_moe", {"num_dense_layers": 2}),
        ("nemotron_h", {"hybrid_override_pattern": "MMM*"}),
    ],
)
def test_kinds_of_mlps_are_those_of_the_config(case: str, fields: dict[str, Any], family: Family) -> None:
    checkpoint, layout = _opened(case, family)
    config = {**checkpoint.config, **fields}
    whole = SimpleNamespace(config=config, text_config=config, tensors=checkpoint.tensors)
    faults = structure_faults(whole, layout, classify(layout, checkpoint.tensors))  # type: ignore[arg-type]
    assert any("by config.json, yet holds" in str(fault) for fault in faults)


@pytest.mark.parametrize("case", CASES)
def test_every_lost_tensor_is_missed(case: str, family: Family) -> None:
    checkpoint, layout = _opened(case, family)
    tensors = dict(checkpoint.tensors)
    unseen = [
        name for name in tensors if not _faults(checkpoint, layout, {k: v for k, v in tensors.items() if k != name})
    ]
    assert [name for name in unseen if not ALONE.fullmatch(name)] == []
    assert len(unseen) < len(tensors) / 2


@pytest.mark.parametrize("case", CASES)
def test_a_whole_part_that_one_layer_lacks_is_missed(case: str, family: Family) -> None:
    """Mixer, MLP or experts: the layer would otherwise look like one of another kind."""
    checkpoint, layout = _opened(case, family)
    tensors = dict(checkpoint.tensors)
    parts = {
        match[0]
        for name in tensors
        if (match := re.match(
            r".*layers\.\d+\.(?:self_attn|linear_attn|mamba|mixer|conv|mlp|feed_forward|block_sparse_moe|temporal_block"
            r"|mlp_block|mlp\.experts|block_sparse_moe\.experts|feed_forward\.experts|mixer\.experts)\.", name
        ))
        and "tower" not in name
    }  # fmt: skip
    assert parts
    for part in parts:
        left = {name: header for name, header in tensors.items() if not name.startswith(part)}
        assert _faults(checkpoint, layout, left), part


@pytest.mark.parametrize("case", CASES)
def test_widths_that_no_weight_has_are_named(case: str, family: Family) -> None:
    """Every letter of every formula, one wrong at a time."""
    checkpoint, layout = _opened(case, family)
    shapes = {p.rule.shape for p in classify(layout, checkpoint.tensors).values()}
    axes = [re.findall(r"[A-Za-z]+", axis) for shape in shapes for axis in shape.split(",")]
    used = {letter for axis in axes if set(axis) <= set(layout.sizes) for letter in axis}
    assert {"H", "V"} <= used
    config = checkpoint.config
    text = config.get("text_config")
    for key in {layout.sizes[letter][0] for letter in used} & set(text or config):
        value = checkpoint.text_config[key]
        wrong = {key: [each + 8 for each in value] if isinstance(value, list) else value + 8}
        changed = config | {"text_config": {**text, **wrong}} if text else config | wrong
        other = layout_for(changed)
        found = _faults(checkpoint, other, dict(checkpoint.tensors))
        assert any(key in fault for fault in found), key


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "DeepSeek-V3"])
def test_published_models_have_the_widths_of_their_configs(name: str) -> None:
    config = PUBLISHED[name].config
    layout = layout_for(config)
    shapes = shapes_of(config)
    from sparkquant.sizes import size_faults

    assert list(size_faults(layout, classify(layout, shapes), shapes)) == []


@pytest.mark.parametrize("case", CASES)
def test_every_case_names_a_class_of_its_family_alone(case: str) -> None:
    (name,) = CASES[case]["architectures"]
    assert families_of(name) == [family_of(case)]


def test_every_family_has_classes_and_no_class_two_families() -> None:
    seen: dict[str, str] = {}
    for family in family_names():
        module = __import__(f"sparkquant.layouts.{family}", fromlist=["ARCHITECTURES"])
        assert module.ARCHITECTURES
        for name in module.ARCHITECTURES:
            assert seen.setdefault(name, family) == family
