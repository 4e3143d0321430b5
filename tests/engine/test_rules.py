"""The engine's naming rules, against the behaviour that was measured on the shipped functions."""

from __future__ import annotations

import pytest

from sparkquant.engine.models import GENERIC, MODELS
from sparkquant.engine.rules import (
    VERSIONS,
    EngineModel,
    Entries,
    Ignored,
    Pattern,
    engine_modules,
    ignored,
    matched_target,
)
from sparkquant.layouts import family_layout, family_names

VL = MODELS["qwen3_5"]
AT = "model.language_model.layers.0."
GATES = [f"{AT}linear_attn.in_proj_a", f"{AT}linear_attn.in_proj_b"]
QKVZ = [f"{AT}linear_attn.in_proj_qkv", f"{AT}linear_attn.in_proj_z"]
QKV = [f"{AT}self_attn.{leaf}_proj" for leaf in "qkv"]
MLP = [f"{AT}mlp.gate_proj", f"{AT}mlp.up_proj"]


def entries(*texts: str, model: EngineModel = VL) -> Entries:
    return Entries(Pattern(model.engine_entry(text)) for text in texts)


def states(members: list[str], *texts: str, model: EngineModel = VL) -> set[str]:
    (module,) = engine_modules(model, members)
    return {str(ignored(module, entries(*texts, model=model), version)) for version in VERSIONS}


def hits(members: list[str], *texts: str, version: str = "0.25") -> list[int | None]:
    (module,) = engine_modules(VL, members)
    return matched_target(module, entries(*texts), version)


@pytest.mark.parametrize(
    ("members", "ignore", "expected"),
    [
        (GATES, [r"re:.*linear_attn\.in_proj_[ab]$"], {"yes"}),
        (GATES, [r"re:.*in_proj_a$", r"re:.*in_proj_b$"], {"yes"}),
        (GATES, [r"re:.*in_proj_a$"], {"partial"}),
        (GATES, GATES, {"yes"}),
        (GATES, [r"re:.*in_proj_b"], {"partial", "yes"}),
        (GATES, [r"re:^model\.language_model\.layers.*"], {"no"}),
        (GATES, [r"re:linear_attn\.in_proj_[ab]"], {"no"}),
        (["lm_head"], ["lm_head"], {"no"}),
        (["lm_head"], [r"re:.*lm_head$"], {"yes"}),
        (["mtp.fc"], ["mtp.*"], {"no"}),
        (["mtp.fc"], [r"re:^mtp.*"], {"yes"}),
        (["model.visual.blocks.0.attn.qkv"], [r"re:model\.visual.*"], {"no"}),
        (["model.visual.blocks.0.attn.qkv"], [r"re:.*visual.*"], {"yes"}),
        (["model.visual.blocks.0.attn.qkv"], ["model.visual.blocks.0.attn.qkv"], {"yes"}),
    ],
)
def test_ignore_lists(members: list[str], ignore: list[str], expected: set[str]) -> None:
    assert states(members, *ignore) == expected


def test_targets_by_version() -> None:
    parts = ["Linear", r"re:.*(q|k|v)_proj$", "re:.*v_proj$"]
    assert hits(QKV, *parts) == [1]  # `.*v_proj$` is a part of the fused name itself
    assert hits(MLP, "Linear", r"re:.*mlp\.(gate|up)_proj$", version="0.26") == [0]
    assert hits(MLP, "Linear", r"re:.*mlp\.(gate|up)_proj$", version="0.33") == [1]
    assert hits(QKV, "Linear", r"re:.*self_attn.*") == [1]
    assert hits(QKVZ, r"re:.*in_proj_qkv$", r"re:.*in_proj_z$") == [0]
    assert hits(QKVZ, r"re:.*in_proj_qkv$") == [None]
    assert hits(["lm_head"], "Linear") == [None]
    assert hits(["lm_head"], "Linear", "re:.*lm_head$") == [1]


def test_experts_are_looked_up_at_expert_zero() -> None:
    experts = [f"{AT}mlp.experts.{number}.{part}_proj" for number in range(3) for part in ("gate", "up", "down")]
    (module,) = engine_modules(VL, experts)
    assert module.name == "language_model.model.layers.0.mlp.experts"
    assert module.is_moe
    assert len(module.shards) == 3
    assert hits(experts, r"re:.*experts\.0\.gate_proj$") == [0, None, None]
    assert hits(experts, "Linear") == [0, 0, 0]
    assert hits(experts, "RowParallelLinear") == [None, None, None]
    assert states(experts, r"re:.*experts\.\d+\..*") == {"yes"}
    assert states(experts, r"re:.*gate_proj$") == {"partial"}
    assert engine_modules(VL, [f"{AT}mlp.experts.gate_up_proj"])[0].name == module.name


def test_names_are_renamed_and_fused() -> None:
    modules = engine_modules(VL, [*QKV, *GATES, *MLP, "lm_head", f"{AT}mlp.down_proj"])
    assert [module.name.removeprefix("language_model.model.layers.0.") for module in modules] == [
        "self_attn.qkv_proj", "linear_attn.in_proj_ba", "mlp.gate_up_proj", "language_model.lm_head", "mlp.down_proj",
    ]  # fmt: skip
    assert [module.kind for module in modules][:2] == ["QKVParallelLinear", "MergedColumnParallelLinear"]
    assert modules[1].shards[0].endswith("in_proj_b")
    assert MODELS["qwen3_5_text"].engine_name("lm_head") == "lm_head"
    assert engine_modules(GENERIC, ["lm_head"])[0].shards == ("lm_head",)


def test_what_the_engine_never_asks_about() -> None:
    for name in ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d", "input_layernorm", "linear_attn.A_log"):
        assert not VL.takes_scheme(AT + name)
    assert not VL.takes_scheme("model.visual.patch_embed.proj")
    assert VL.takes_scheme("mtp.fc")
    assert VL.takes_scheme(AT + "mlp.gate_proj")


@pytest.mark.parametrize("family", family_names())
def test_layouts_fuse_as_the_engine_does(family: str) -> None:
    # An expert's gate and up are no module of the engine's: all experts of a layer are one.
    fused = {rule.fused for rule in family_layout(family).rules if rule.fused and "experts" not in rule.pattern}
    known = {name for model in (GENERIC, *MODELS.values()) for name in model.fused}
    assert fused <= known or family not in MODELS


def test_qwen3_next_stores_the_delta_net_fused() -> None:
    name = "model.layers.0.linear_attn.in_proj_ba"
    model = MODELS["qwen3_next"]
    assert states([name], r"re:.*in_proj_ba$", model=model) == {Ignored.YES}
    assert states([name], r"re:.*in_proj_[ab]$", model=model) == {Ignored.NO}
