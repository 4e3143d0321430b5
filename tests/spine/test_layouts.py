"""Classification is total, unique and strict: every published name has exactly one class, every other name none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant import layouts
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError, UnknownFamily, UnknownTensor
from sparkquant.layers import PROTECTED, UNPROTECTABLE, LayerClass, Layout, classify, config_int
from tests.checkpoints import CONFIGS, config_of, shapes_of
from tests.data import published
from tests.data.shapes import Shapes, tensor_shapes
from tests.groups import fusion_groups

Case = tuple[dict[str, Any], Shapes]


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for model_type in CONFIGS:
        config = config_of(model_type)
        cases[model_type] = config, shapes_of(config)
        if "moe" in model_type:
            cases[f"{model_type} per expert"] = config, shapes_of(config, fused_experts=False)
    dense_first = {**config_of("qwen3_next"), "mlp_only_layers": [0]}
    cases["qwen3_next with a dense layer"] = dense_first, shapes_of(dense_first)
    cases["tied"] = config_of("qwen3_5", tied=True), shapes_of(config_of("qwen3_5", tied=True))
    cases["27B"] = published.QWEN3_5_27B, published.qwen3_5_27b_shapes()
    cases["35B-A3B"] = published.QWEN3_5_35B_A3B, tensor_shapes(published.QWEN3_5_35B_A3B)
    small_next = {**published.QWEN3_NEXT_80B_A3B, "mtp_num_hidden_layers": 1, "num_experts": 3}
    cases["80B-A3B"] = small_next, tensor_shapes(small_next)
    return cases


CASES = _cases()


def _layout(case: str) -> Layout:
    return layouts.layout_for(CASES[case][0])


@pytest.mark.parametrize("case", CASES)
def test_exactly_one_rule_matches_every_name(case: str) -> None:
    layout, shapes = _layout(case), CASES[case][1]
    for name in shapes:
        matching = [rule for rule in layout.rules if re.fullmatch(rule.pattern, name)]
        assert len(matching) == 1, (name, [rule.pattern for rule in matching])
        assert layout.rule_of(name) is matching[0]


def _expected_class(name: str) -> LayerClass:
    """What a reader of the model card would say, spelled without the layouts' regexes."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if name.startswith("mtp."):
        return LayerClass.MTP
    if name.startswith("model.visual."):
        return LayerClass.VISION
    if leaf in ("embed_tokens", "lm_head"):
        return LayerClass.EMBED if leaf == "embed_tokens" else LayerClass.LM_HEAD
    if leaf.endswith(("norm", "layernorm")):
        return LayerClass.NORM
    if ".linear_attn." in name:
        kinds = {
            "out_proj": "out",
            "conv1d": "conv",
            "in_proj_qkv": "qkvz",
            "in_proj_z": "qkvz",
            "in_proj_qkvz": "qkvz",
        }
        return LayerClass(f"linear_attention.{kinds.get(leaf, 'gates')}")
    if ".self_attn." in name:
        return LayerClass.ATTENTION_OUT if leaf == "o_proj" else LayerClass.ATTENTION_QKV
    if leaf in ("gate", "shared_expert_gate"):
        return LayerClass.ROUTER
    region = "experts" if ".experts." in name else "shared_expert" if ".shared_expert." in name else "mlp"
    return LayerClass(f"{region}.{'down' if leaf == 'down_proj' else 'gate_up'}")


@pytest.mark.parametrize("case", CASES)
def test_every_name_has_the_class_of_its_role(case: str) -> None:
    placements = classify(_layout(case), CASES[case][1])
    assert {name: p.layer_class for name, p in placements.items()} == {n: _expected_class(n) for n in CASES[case][1]}


def test_27b_class_counts() -> None:
    shapes = CASES["27B"][1]
    counts: dict[str, int] = {}
    for placement in classify(_layout("27B"), shapes).values():
        counts[placement.layer_class] = counts.get(placement.layer_class, 0) + 1
    assert counts == {
        "attention.qkv": 48, "attention.out": 16, "linear_attention.qkvz": 96, "linear_attention.out": 48,
        "linear_attention.gates": 192, "linear_attention.conv": 48, "mlp.gate_up": 128, "mlp.down": 64,
        "embed": 1, "lm_head": 1, "norm": 209, "vision": 333, "mtp": 15,
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_matrices_alone_are_linear_and_layers_are_numbered(case: str) -> None:
    shapes = CASES[case][1]
    for name, placement in classify(_layout(case), shapes).items():
        if placement.rule.linear:
            assert len(shapes[name]) == (3 if placement.rule.parts else 2), name
            assert placement.group
            assert placement.scale_group
        number = re.search(r"\blayers\.(\d+)\.", name)
        assert placement.layer == (int(number[1]) if number else None)
        assert name in (placement.module, f"{placement.module}.weight")


def _group(case: str, member: str) -> set[str]:
    placements = classify(_layout(case), CASES[case][1])
    groups = fusion_groups(placements)
    parent, _, _ = member.rpartition(".weight")
    found = {name.removesuffix(".weight") for name in groups[placements[member].group]}
    assert parent in found or member in found
    return found


def test_fusion_groups_of_the_27b_are_those_of_the_engine() -> None:
    at = "model.language_model.layers"
    attention, net, mlp = f"{at}.3.self_attn", f"{at}.0.linear_attn", f"{at}.0.mlp"
    assert _group("27B", f"{attention}.k_proj.weight") == {f"{attention}.{p}_proj" for p in "qkv"}
    assert _group("27B", f"{attention}.o_proj.weight") == {f"{attention}.o_proj"}
    assert _group("27B", f"{net}.in_proj_z.weight") == {f"{net}.in_proj_qkv", f"{net}.in_proj_z"}
    assert _group("27B", f"{net}.out_proj.weight") == {f"{net}.out_proj"}
    assert _group("27B", f"{mlp}.up_proj.weight") == {f"{mlp}.gate_proj", f"{mlp}.up_proj"}
    assert _group("27B", "lm_head.weight") == {"lm_head"}
    # Attention 2 modules x 16 layers, delta net 2 x 48, MLP 2 x 64, lm_head, and 4 of the draft head.
    assert len(fusion_groups(classify(_layout("27B"), CASES["27B"][1]))) == 32 + 96 + 128 + 1 + 4


def test_all_experts_of_a_layer_are_one_group_and_gate_up_of_one_expert_share_a_scale() -> None:
    at = "model.layers.1.mlp"
    group = _group("qwen3_next", f"{at}.experts.2.down_proj.weight")
    assert group == {f"{at}.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")}
    placements = classify(_layout("qwen3_next"), CASES["qwen3_next"][1])
    scale = {p: placements[f"{at}.experts.2.{p}_proj.weight"].scale_group for p in ("gate", "up", "down")}
    assert scale["gate"] == scale["up"] != scale["down"]
    assert scale["gate"] != placements[f"{at}.experts.3.gate_proj.weight"].scale_group
    assert _group("qwen3_next", f"{at}.shared_expert.up_proj.weight") == {
        f"{at}.shared_expert.gate_proj", f"{at}.shared_expert.up_proj"
    }  # fmt: skip


def test_fused_expert_tensors_of_a_layer_are_one_group() -> None:
    at = "model.language_model.layers.1.mlp"
    assert _group("qwen3_5_moe", f"{at}.experts.down_proj") == {f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"}
    per_expert = classify(_layout("qwen3_5_moe per expert"), CASES["qwen3_5_moe per expert"][1])
    assert per_expert[f"{at}.experts.0.up_proj.weight"].group == f"{at}.experts"


def test_delta_net_of_qwen3_next_is_one_tensor_per_module() -> None:
    at = "model.layers.0.linear_attn"
    assert _group("qwen3_next", f"{at}.in_proj_qkvz.weight") == {f"{at}.in_proj_qkvz"}
    for case, gates in (("qwen3_next", ["in_proj_ba"]), ("qwen3_5_text", ["in_proj_a", "in_proj_b"])):
        for gate in gates:
            placement = _layout(case).place(f"{at}.{gate}.weight")
            assert placement is not None
            assert placement.layer_class is LayerClass.LINEAR_ATTENTION_GATES
            assert not placement.rule.linear


@pytest.mark.parametrize("case", CASES)
def test_no_group_spans_two_regions(case: str) -> None:
    placements = classify(_layout(case), CASES[case][1])
    for group in fusion_groups(placements).values():
        assert len({name.startswith("mtp.") for name in group}) == 1
        assert len({placements[name].layer for name in group}) == 1


@pytest.mark.parametrize("case", CASES)
def test_the_draft_head_region_wins_over_kind(case: str) -> None:
    layout, shapes = _layout(case), CASES[case][1]
    inside = [name for name in shapes if name.startswith("mtp.")]
    assert inside
    assert all(placement.layer_class is LayerClass.MTP for placement in classify(layout, inside).values())
    fc = layout.place("mtp.fc.weight")
    assert fc is not None
    assert not fc.rule.linear, "mtp.fc stays 16-bit even in an 8-bit draft head"


@pytest.mark.parametrize("family", layouts.family_names())
def test_protected_classes_hold_no_quantizable_tensor_except_the_draft_head(family: str) -> None:
    layout = layouts.family_layout(family)
    assert {c for c in layout.linear_classes if c in PROTECTED} <= UNPROTECTABLE
    assert layout.linear_classes <= layout.classes
    assert {"norm", "embed"} <= layout.classes
    assert {"mtp"} == UNPROTECTABLE


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_the_qwen_hybrids_have_gates_a_convolution_and_a_draft_head(family: str) -> None:
    assert {"linear_attention.gates", "linear_attention.conv", "mtp"} <= layouts.family_layout(family).classes


def test_the_protected_set_is_the_documented_one() -> None:
    assert set(PROTECTED) == {
        "linear_attention.gates", "linear_attention.conv", "vision", "audio", "mtp", "router", "adapter", "norm",
        "state", "embed", "ssm.dt", "ssm.conv",
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_always_ignored_modules_are_never_quantizable(case: str) -> None:
    layout = _layout(case)
    ignored = [re.compile(entry.removeprefix("re:")) for entry in layout.ignore_always]
    hit = {entry.pattern: 0 for entry in ignored}
    for placement in classify(layout, CASES[case][1]).values():
        for entry in ignored:
            if entry.match(placement.module):
                hit[entry.pattern] += 1
                assert placement.layer_class in PROTECTED, (entry.pattern, placement.module)
    assert hit[r".*linear_attn\.conv1d$"]
    assert hit[r".*embed_tokens$"]


def test_row_parallel_is_what_ends_a_block() -> None:
    for case in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        for name, placement in classify(_layout(case), CASES[case][1]).items():
            ends = placement.module.endswith(("o_proj", "out_proj", "down_proj")) and placement.rule.linear
            assert placement.rule.row_parallel == ends, name


def test_unknown_names_are_all_reported_with_the_file_to_edit() -> None:
    names = [*CASES["27B"][1], *(f"model.language_model.layers.{i}.linear_attn.in_proj_x.weight" for i in range(70))]
    with pytest.raises(UnknownTensor) as caught:
        classify(_layout("27B"), names, source="folder")
    assert caught.value.what == "70 tensors of folder cannot be classified"
    assert [problem.where for problem in caught.value.problems] == names[-70:]
    assert "sparkquant/layouts/qwen3_5.py" in caught.value.hint
    assert caught.value.exit_code == 3
    shown = str(caught.value).splitlines()
    assert names[-70] in shown[1]
    assert shown[-2] == "  and 20 more"


@pytest.mark.parametrize(
    ("model_type", "suggestion"),
    [("qwen3.5", "qwen3_5"), ("qwen3_5_moee", "qwen3_5_moe"), ("Qwen3_next", "qwen3_next")],
)
def test_unknown_model_type_is_refused_with_a_suggestion(model_type: str, suggestion: str) -> None:
    with pytest.raises(UnknownFamily) as caught:
        layouts.layout_for({"model_type": model_type})
    assert f"did you mean {suggestion!r}?" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ["qwen3_5"]}, {"model_type": 5}])
def test_a_missing_or_odd_model_type_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnknownFamily, match="has no layout"):
        layouts.layout_for(config)


def test_every_layout_file_is_found_and_named_after_its_family() -> None:
    assert set(CONFIGS) <= set(layouts.model_types())
    for model_type in layouts.model_types():
        assert layouts.layout_for({"model_type": model_type}).family in layouts.family_names()


def test_an_expert_count_that_is_no_number_is_a_checkpoint_error() -> None:
    for model_type in ("qwen3_next", "qwen3_5_moe_text"):
        for value in ("many", [4], 4.5, True):
            with pytest.raises(CheckpointError, match="num_experts"):
                layouts.layout_for({"model_type": model_type, "num_experts": value})
    assert config_int({}, "x", 3) == 3


def test_small_models_share_one_classification_with_the_published_ones(checkpoints: Callable[..., Path]) -> None:
    stored = Checkpoint.open(checkpoints("qwen3_5")).tensors
    kinds = {re.sub(r"\d+", "N", name): p.layer_class for name, p in classify(_layout("27B"), stored).items()}
    assert kinds == {
        re.sub(r"\d+", "N", n): p.layer_class for n, p in classify(_layout("27B"), CASES["27B"][1]).items()
    }


# Near misses: one edit away from a real name, or garbage around it.


def _normal(name: str) -> str:
    return re.sub(r"(?<=\.)[0-9]+(?=\.)", "N", name.replace("model.language_model.", "model.", 1))


_BY_FAMILY: dict[str, dict[str, LayerClass]] = {}
_LAYOUT_OF: dict[str, Layout] = {}
for _case in CASES:
    _one = _layout(_case)
    _LAYOUT_OF[_one.family] = _one
    _BY_FAMILY.setdefault(_one.family, {}).update({_normal(name): _expected_class(name) for name in CASES[_case][1]})
_NAMES = {family: sorted({re.sub(r"N", "0", name) for name in known}) for family, known in _BY_FAMILY.items()}
_VISION = re.compile(r"model\.visual\.(blocks|merger|patch_embed|pos_embed|deepstack_merger_list)\.[^\n]+")


def _check(family: str, name: str) -> None:
    placement = _LAYOUT_OF[family].place(name)
    expected = _BY_FAMILY[family].get(_normal(name))
    if expected is not None:
        assert placement is not None
        assert placement.layer_class is expected
    elif not (family != "qwen3_next" and _VISION.fullmatch(name)) and not _dense_variant(family, name):
        assert placement is None, f"{name!r} was taken for {placement.layer_class}"


def _dense_variant(family: str, name: str) -> bool:
    """Qwen3-Next may hold dense layers, in the draft head too."""
    dense = r"(model\.(language_model\.)?|mtp\.)layers\.[0-9]+\.mlp\.(gate|up|down)_proj\.weight"
    return family != "qwen3_5" and re.fullmatch(dense, name) is not None


@st.composite
def _near_misses(draw: st.DrawFn) -> tuple[str, str]:
    family = draw(st.sampled_from(sorted(_NAMES)))
    name = draw(st.sampled_from(_NAMES[family]))
    at = draw(st.integers(0, len(name)))
    text = draw(
        st.text(max_size=3) | st.sampled_from(["x", ".", "2", "_", "\n", "٣", "a", " ", "weight", "model.", "layers."])
    )
    cut = draw(st.integers(0, 3))
    return family, name[:at] + text + name[at + cut :]


@given(_near_misses())
def test_a_near_miss_is_unknown_or_the_same_tensor_kind(case: tuple[str, str]) -> None:
    _check(*case)


@given(st.sampled_from(sorted(_NAMES)), st.text(max_size=60))
def test_garbage_is_never_classified(family: str, name: str) -> None:
    _check(family, name)


@pytest.mark.parametrize("family", sorted(_NAMES))
@pytest.mark.parametrize(
    "edit",
    [
        lambda n: n + "2", lambda n: "x" + n, lambda n: n + "\n", lambda n: n + "_packed", lambda n: "model." + n,
        lambda n: n.upper(), lambda n: n.replace(".0.", ".٣."), lambda n: n.replace(".0.", ".-1."),
        lambda n: n.replace(".", "/"),
        lambda n: n.removesuffix("weight") + "bias", lambda n: n.removesuffix(".weight"), lambda n: " " + n,
    ],
)  # fmt: skip
def test_systematic_edits_of_every_name(family: str, edit: Callable[[str], str]) -> None:
    for name in _NAMES[family]:
        _check(family, edit(name))
