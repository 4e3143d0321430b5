"""Every name of every family has exactly one class, and it is the class of its role."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant import layouts
from sparkquant.engine.rules import VERSIONS
from sparkquant.errors import CheckpointError, UnknownFamily
from sparkquant.layers import ENGINES, PROTECTED, UNPROTECTABLE, LayerClass, Layout, classify
from sparkquant.layouts._indices import among, at_least, below
from tests.families.configs import CASES, KIMI, MISTRAL4, family_of
from tests.families.published import PUBLISHED
from tests.families.shapes import shapes_of
from tests.groups import fusion_groups

NAMES = {case: shapes_of(config) for case, config in CASES.items()}
LAYOUTS: dict[str, Layout] = {case: layouts.layout_for(config) for case, config in CASES.items()}

# An oracle that splits names into words and knows no regex of the layouts.

_NORMS = ("norm", "layernorm", "norm_f", "layer_norm", "_norm1", "layernorm_1", "layernorm_2")
_CHOOSERS = ("router", "gate", "shared_expert_gate", "expert_bias", "e_score_correction_bias", "per_expert_scale")


def _is_draft(name: str, config: dict[str, Any]) -> bool:
    text = config.get("text_config", config)
    number = re.search(r"^model\.(?:language_model\.)?layers\.(\d+)\.", name)
    behind = number is not None and int(number[1]) >= text.get("num_hidden_layers", 10**6)
    return name.startswith("mtp.") or behind


def expected(name: str, case: str) -> str:
    """What a reader of the model's code would call a tensor."""
    config, words = CASES[case], name.removesuffix(".weight").split(".")
    leaf, inside = words[-1], set(words)
    if _is_draft(name, config):
        return "mtp"
    if inside & {"visual", "vision_tower", "multi_modal_projector", "embed_vision"}:
        return "vision"
    if inside & {"indexer"}:
        return "norm" if "norm" in name.rpartition("indexer")[2] else "router"
    side = ("altup", "laurel", "hyper_connection", "adapter_list", "per_layer_", "latent_proj", "hc_attn", "hc_ffn")
    if any(part in name for part in side) and "embed_tokens_per_layer" not in name:
        is_norm = leaf in ("post_laurel_norm", "post_per_layer_input_norm", "per_layer_projection_norm")
        return "norm" if is_norm else "adapter"
    if leaf in ("lm_head", "embed_tokens", "embeddings", "embed_tokens_per_layer") or "ngram_embedding" in inside:
        return "lm_head" if leaf == "lm_head" else "embed"
    if leaf in ("g_a_proj", "g_b_proj", "key_proj", "value_proj") or (leaf == "linear" and words[-2].isdigit()):
        return "adapter"
    if leaf.endswith(_NORMS) or leaf.startswith("norm_"):
        return "norm"
    return _of_a_layer(name, leaf, words, case)


def _of_a_layer(name: str, leaf: str, words: list[str], case: str) -> str:
    family, inside = family_of(case), set(words)
    if leaf.startswith(("layer_multipliers", "ngram_heads", "slope", "layer_scalar")) or leaf.endswith("_decay"):
        return "state"
    if inside & {"rg_lru"}:
        return "linear_attention.gates"
    if "conv" in leaf or words[-2].startswith("conv1d") or words[-2:] == ["conv_1d", "bias"]:
        is_ssm = inside & {"mamba", "mixer", "conv"}
        return "ssm.conv" if is_ssm else "linear_attention.conv"
    if leaf in ("x_proj", "D", "A_log", "dt_bias") or "dt_proj" in inside:
        delta = "linear_attn" in inside or "self_attn" in inside
        return "linear_attention.gates" if delta else "ssm.dt"
    if leaf == "bias":
        return "state"
    if leaf in _CHOOSERS or "router" in inside:
        return "router"
    if leaf in ("a_proj", "b_proj", "f_a_proj", "f_b_proj", "in_proj_a", "in_proj_b"):
        return "linear_attention.gates"
    if leaf in ("in_proj", "out_proj") and inside & {"mamba", "mixer", "conv"}:
        return "short_conv" if "conv" in inside else f"ssm.{leaf.partition('_')[0]}"
    return _mixing(name, leaf, words, family)


def _mixing(name: str, leaf: str, words: list[str], family: str) -> str:
    inside = set(words)
    if "mla" in _attention_kind(name, family) and inside & {"self_attn"}:
        return "mla.out" if leaf == "o_proj" else "mla.kv" if leaf.startswith("kv_") else "mla.q"
    linear = "linear_attn" in inside or "kda" in _attention_kind(name, family)
    linear |= leaf in ("qkv_proj", "output_gate", "linear_x", "linear_y", "linear_out")
    linear |= family == "minimax" and leaf == "out_proj"
    if linear:
        return f"linear_attention.{'out' if leaf in ('o_proj', 'out_proj', 'linear_out') else 'qkvz'}"
    if leaf in ("q_proj", "k_proj", "v_proj"):
        return "attention.qkv"
    if leaf in ("o_proj", "out_proj"):
        return "attention.out"
    shared = inside & {"shared_expert", "shared_experts", "shared_mlp"}
    region = "shared_expert" if shared else "mlp"
    if not shared and inside & {"experts", "block_sparse_moe"}:
        region = "experts"
    return f"{region}.{'down' if leaf in ('down_proj', 'w2', 'output_linear') else 'gate_up'}"


def _attention_kind(name: str, family: str) -> str:
    """`kda` and `mla` by the layer's number in the small configs, where three linear layers come first."""
    number = re.search(r"layers\.(\d+)\.self_attn", name)
    if number is None:
        return ""
    if family in ("kimi_linear", "glm5_next"):
        return "kda" if int(number[1]) < 3 else "mla"
    return "mla" if family in ("deepseek_v3", "glm_moe_dsa", "mistral4") else ""


@pytest.mark.parametrize("case", CASES)
def test_every_name_has_the_class_of_its_role(case: str) -> None:
    found = {name: str(p.layer_class) for name, p in classify(LAYOUTS[case], NAMES[case]).items()}
    assert found == {name: expected(name, case) for name in NAMES[case]}


@pytest.mark.parametrize("case", CASES)
def test_exactly_one_rule_matches_every_name(case: str) -> None:
    layout = LAYOUTS[case]
    patterns = [re.compile(rule.pattern, re.ASCII) for rule in layout.rules]
    for name in NAMES[case]:
        matching = [rule for rule, pattern in zip(layout.rules, patterns, strict=True) if pattern.fullmatch(name)]
        assert len(matching) == 1, (name, [rule.pattern for rule in matching])
        assert layout.rule_of(name) is matching[0]


@pytest.mark.parametrize("case", CASES)
def test_layouts_of_small_and_large_configs_are_of_one_family(case: str) -> None:
    assert LAYOUTS[case].family == family_of(case)
    assert family_of(case) in layouts.family_names()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_names_are_all_known(name: str) -> None:
    layout = layouts.layout_for(PUBLISHED[name].config)
    placements = classify(layout, shapes_of(PUBLISHED[name].config))
    assert {p.layer_class for p in placements.values()} <= layout.classes


@pytest.mark.parametrize("case", CASES)
def test_linears_are_matrices_with_a_group_inside_one_layer_and_region(case: str) -> None:
    placements = classify(LAYOUTS[case], NAMES[case])
    for name, placement in placements.items():
        if placement.rule.linear:
            assert len(NAMES[case][name]) == (3 if placement.rule.parts else 2), name
            assert placement.group
            assert placement.scale_group
    for group in fusion_groups(placements).values():
        members = [placements[name] for name in group]
        assert len({p.layer for p in members}) == 1
        assert len({p.layer_class is LayerClass.MTP for p in members}) == 1


@pytest.mark.parametrize("case", CASES)
def test_ignored_modules_are_never_quantizable(case: str) -> None:
    layout = LAYOUTS[case]
    entries = [re.compile(entry.removeprefix("re:")) for entry in layout.ignore_always]
    for placement in classify(layout, NAMES[case]).values():
        if any(entry.match(placement.module) for entry in entries):
            assert placement.layer_class in PROTECTED, placement.module


def _group(case: str, member: str) -> set[str]:
    placements = classify(LAYOUTS[case], NAMES[case])
    return fusion_groups(placements)[placements[member].group]


@pytest.mark.parametrize(
    ("case", "at", "members"),
    [
        ("deepseek_v3", "model.layers.0.self_attn", ["q_a_proj", "kv_a_proj_with_mqa"]),
        ("glm_moe_dsa", "model.layers.1.self_attn", ["q_a_proj", "kv_a_proj_with_mqa"]),
        ("mistral4", "language_model.model.layers.0.self_attn", ["q_a_proj", "kv_a_proj_with_mqa"]),
        ("olmo_hybrid", "model.layers.0.linear_attn", ["q_proj", "k_proj", "v_proj", "g_proj"]),
        ("lfm2", "model.layers.0.feed_forward", ["w1", "w3"]),
        ("granitemoehybrid", "model.layers.0.shared_mlp", ["input_linear"]),
        ("zamba2", "model.layers.1.shared_transformer.feed_forward", ["gate_up_proj"]),
        ("falcon_h1", "model.layers.0.feed_forward", ["gate_proj", "up_proj"]),
        ("kimi_linear", "model.layers.0.self_attn", ["q_proj"]),
        ("minimax", "model.layers.0.self_attn", ["qkv_proj"]),
        ("minimax", "model.layers.1.self_attn", ["q_proj", "k_proj", "v_proj"]),
        ("glm4_moe", "model.layers.2.self_attn", ["q_proj", "k_proj", "v_proj"]),
    ],
)
def test_fusion_groups(case: str, at: str, members: list[str]) -> None:
    assert _group(case, f"{at}.{members[0]}.weight") == {f"{at}.{member}.weight" for member in members}


@pytest.mark.parametrize("case", ["kimi_linear", "lfm2_moe", "minimax_m2"])
def test_gate_and_up_of_one_expert_share_a_scale(case: str) -> None:
    layout = LAYOUTS[case]
    name = next(n for n in NAMES[case] if ".experts.0.w1." in n)
    one, three, two = (layout.place(name.replace(".w1.", f".w{i}.")) for i in (1, 3, 2))
    assert one is not None
    assert two is not None
    assert three is not None
    assert one.group == two.group == three.group
    assert one.scale_group == three.scale_group != two.scale_group


def test_granite_experts_are_written_below_the_module_where_the_engine_looks() -> None:
    placement = LAYOUTS["granitemoehybrid"].place("model.layers.2.block_sparse_moe.input_linear.weight")
    assert placement is not None
    assert placement.module == "model.layers.2.block_sparse_moe.experts.gate_up_proj"
    assert placement.group == "model.layers.2.block_sparse_moe.experts"


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe", "glm_moe_dsa", "glm5_next"])
def test_the_draft_head_is_the_layer_behind_the_last(case: str) -> None:
    config = CASES[case]
    layout, text = LAYOUTS[case], config.get("text_config", config)
    last = text["num_hidden_layers"] - 1
    path = "model.language_model." if "text_config" in config else "model."
    for name in ("self_attn.o_proj", "mlp.experts.0.up_proj", "input_layernorm", "mlp.gate"):
        inside, behind, far = (layout.place(f"{path}layers.{i}.{name}.weight") for i in (last, last + 1, last + 40))
        assert inside is not None
        assert behind is not None
        assert far is not None
        assert inside.layer_class is not LayerClass.MTP
        assert behind.layer_class is far.layer_class is LayerClass.MTP
    assert layout.place(f"{path}layers.{last}.eh_proj.weight") is None
    head = layout.place(f"{path}layers.{last + 1}.eh_proj.weight")
    assert head is not None
    assert not head.rule.linear
    assert layout.mtp.declared
    assert re.search(layout.mtp.region, f"model.layers.{last + 1}.mlp.gate")
    assert not re.search(layout.mtp.region, f"model.layers.{last}.mlp.gate")


@pytest.mark.parametrize("family", layouts.family_names())
def test_nothing_protected_takes_a_scheme_except_the_draft_head(family: str) -> None:
    layout = layouts.family_layout(family)
    assert {c for c in layout.linear_classes if c in PROTECTED} <= UNPROTECTABLE
    assert {"embed", "norm"} <= layout.classes


# Layer kinds by config, in every spelling.


def test_kimi_layer_kinds_by_either_spelling_of_the_config() -> None:
    newer: dict[str, Any] = {key: value for key, value in KIMI.items() if key != "linear_attn_config"}
    newer["layer_types"] = ["linear_attention"] * 3 + ["full_attention"]
    silent = {key: value for key, value in newer.items() if key != "layer_types"}
    for config in (KIMI, newer, silent):
        layout = layouts.layout_for(config)
        for index, kind in enumerate(["linear_attention.qkvz"] * 3 + ["mla.q"]):
            placement = layout.place(f"model.layers.{index}.self_attn.q_proj.weight")
            assert placement is not None
            assert placement.layer_class == kind
        assert layout.place("model.layers.3.self_attn.b_proj.weight") is None
        assert layout.place("model.layers.4.self_attn.q_proj.weight") is None


def test_a_dense_mistral3_is_refused() -> None:
    config = {**MISTRAL4, "text_config": {"model_type": "mistral"}}
    with pytest.raises(UnknownFamily, match="whose text part is 'mistral'"):
        layouts.layout_for(config)


@pytest.mark.parametrize("case", ["kimi_linear", "deepseek_v3", "falcon_h1"])
def test_a_number_of_layers_that_is_none_is_a_checkpoint_error(case: str) -> None:
    for value in ("many", None, [3], True):
        with pytest.raises(CheckpointError, match="num_hidden_layers"):
            layouts.layout_for({**CASES[case], "num_hidden_layers": value})


# Engine versions.


def test_engine_versions_are_those_whose_rules_are_known() -> None:
    assert tuple(VERSIONS) == ENGINES


@pytest.mark.parametrize("case", CASES)
def test_limits_name_known_versions_and_give_a_reason(case: str) -> None:
    layout = LAYOUTS[case]
    limits = [*layout.absent, *(limit for rule in layout.rules for limit in rule.plain)]
    for limit in limits:
        assert limit.versions
        assert set(limit.versions) <= set(ENGINES)
        assert len(limit.reason) > 10


def test_which_versions_run_which_family() -> None:
    versions = {family_of(case): LAYOUTS[case].engines for case in CASES}
    assert {f for f, v in versions.items() if v == ()} == {"bamba", "minimax", "recurrent_gemma", "mistral4"}
    assert {f for f, v in versions.items() if v == ("0.33",)} == {"qwen4_exp", "glm5_next"}
    assert all(v in ((), ("0.33",), ENGINES) for v in versions.values())


def test_what_no_version_takes_quantized() -> None:
    heads = {family_of(case) for case in CASES if "lm_head" in LAYOUTS[case].never_quantized}
    assert heads == {"falcon_h1", "zamba2", "jamba", "mamba2", "falcon_mamba", "qwen4_exp"}
    never = {family_of(case): set(LAYOUTS[case].never_quantized) - {"lm_head"} for case in CASES}
    assert {family: classes for family, classes in never.items() if classes} == {
        "jamba": {"ssm.in", "ssm.out"},
        "falcon_mamba": {"ssm.in", "ssm.out"},
        "qwen4_exp": {"attention.qkv"},
        "glm5_next": {"linear_attention.qkvz", "linear_attention.out", "mla.q", "mla.kv", "mla.out"},
    }


# Numbers as regexes.


@given(st.integers(0, 2000), st.integers(0, 30_000))
def test_numbers_from_and_below(bound: int, number: int) -> None:
    assert (re.fullmatch(at_least(bound), str(number)) is not None) == (number >= bound)
    assert (re.fullmatch(rf"layers\.{below(bound)}\.x", f"layers.{number}.x") is not None) == (number < bound)


@given(st.sets(st.integers(0, 200), max_size=20), st.integers(0, 300))
def test_numbers_among(chosen: set[int], number: int) -> None:
    assert (re.fullmatch(among(chosen), str(number)) is not None) == (number in chosen)


# Near misses.

_EDITS: list[Callable[[str], str]] = [
    lambda n: n + "2", lambda n: "x" + n, lambda n: n + "\n", lambda n: n + "_packed", lambda n: "model.model." + n,
    lambda n: n.upper(), lambda n: n.replace(".0.", ".٣."), lambda n: n.replace(".0.", ".-1."),
    lambda n: n.replace(".", "/"), lambda n: n.removesuffix(".weight") + ".weights", lambda n: " " + n,
    lambda n: n.replace("layers.", "layer."),
]  # fmt: skip
_OPEN = re.compile(
    r"(?:model\.)?(?:visual|vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\..+"
)


@pytest.mark.parametrize("case", CASES)
def test_a_name_with_one_edit_is_unknown(case: str) -> None:
    known = set(NAMES[case])
    for name in known:
        for edit in _EDITS:
            changed = edit(name)
            if changed not in known and not _OPEN.fullmatch(name) and ".altup." not in name:
                assert LAYOUTS[case].place(changed) is None, changed


@given(st.sampled_from(sorted(CASES)), st.text(max_size=60))
def test_garbage_is_never_classified(case: str, name: str) -> None:
    assert LAYOUTS[case].place(name) is None or _OPEN.fullmatch(name)
