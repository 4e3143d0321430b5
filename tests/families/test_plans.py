"""Plans of the new families: which engine versions load the result, what is refused and why, published sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sparkquant
from sparkquant import layouts
from sparkquant.checkpoint import Checkpoint
from sparkquant.decisions import Plan
from sparkquant.errors import PlanError, Problem, RecipeError, UnknownTensor, UsageError
from sparkquant.hfconfig import quantization_config
from sparkquant.layers import ENGINES, MINIMUM_BITS, PROTECTED, LayerClass
from sparkquant.planning import make_plan
from sparkquant.recipe import Recipe, parse_recipe
from sparkquant.recipe_files import load_recipe, recipe_folder, recipe_names
from sparkquant.recipe_schema import recipe_schema
from sparkquant.routing import kernel_rows
from tests.data.published import QWEN3_5_27B, QWEN3_5_35B_A3B, QWEN3_NEXT_80B_A3B, write_headers
from tests.data.shapes import tensor_shapes
from tests.families.builders import build
from tests.families.configs import CASES, family_of
from tests.families.published import PUBLISHED
from tests.families.shapes import shapes_of

Family = Callable[[str], Path]
QWEN = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
OURS = [name for name in recipe_names() if not set(load_recipe(name).families) & QWEN]


def recipe(family: str, **fields: Any) -> Recipe:
    """A recipe from keyword arguments."""
    base = {"name": "trial", "summary": "a recipe of a test", "families": [family], "schemes": {"lm_head": "keep"}}
    return parse_recipe(base | fields)


def planned(folder: Path, chosen: Recipe, **options: Any) -> Plan:
    """The plan of a folder."""
    return make_plan(Checkpoint.open(folder), chosen, **options)


def refusals(folder: Path, chosen: Recipe, **options: Any) -> list[Problem]:
    """All reasons of a refusal."""
    with pytest.raises(PlanError) as caught:
        planned(folder, chosen, **options)
    return list(caught.value.problems)


# Recipes.


@pytest.mark.parametrize("name", OURS)
def test_a_recipe_plans_every_family_it_lists_and_is_refused_elsewhere(name: str, family: Family) -> None:
    chosen = load_recipe(name)
    assert set(chosen.families) <= {family_of(case) for case in CASES}
    for case in CASES:
        if family_of(case) not in chosen.families:
            assert f"this checkpoint is {family_of(case)}" in str(refusals(family(case), chosen)[0])
            continue
        plan = planned(family(case), chosen)
        assert plan.totals["output_bytes"] < plan.totals["source_bytes"], case
        newer = name == "lfm2-w4a16-conv" or case == "granitemoehybrid"
        assert plan.engines == (("0.33",) if newer else plan.layout.engines)
        assert all(d.scheme is None for d in plan.decisions.values() if d.layer_class in PROTECTED)


@pytest.mark.parametrize("name", OURS)
def test_every_line_of_a_recipe_does_something_for_some_member(name: str, family: Family) -> None:
    chosen = load_recipe(name)
    hit: set[LayerClass] = set()
    for case in CASES:
        if family_of(case) in chosen.families:
            hit |= {d.layer_class for d in planned(family(case), chosen).decisions.values() if d.scheme is not None}
    assert hit == {c for c, scheme in chosen.schemes.items() if scheme is not None}


def test_every_family_has_a_recipe_unless_nothing_of_it_can_be_quantized() -> None:
    served = {family for name in recipe_names() for family in load_recipe(name).families}
    assert set(layouts.family_names()) - served == {"falcon_mamba"}


# Published sizes.


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    opened: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in opened:
            config = PUBLISHED[name].config
            folder = write_headers(tmp_path_factory.mktemp("headers"), config, shapes_of(config), shards=8)
            opened[name] = Checkpoint.open(folder)
        return opened[name]

    return get


SMALL = [name for name in PUBLISHED if name != "DeepSeek-V3"]


@pytest.mark.parametrize("name", [*SMALL, pytest.param("DeepSeek-V3", marks=pytest.mark.slow)])
def test_parameters_of_published_models(name: str, published: Callable[[str], Checkpoint]) -> None:
    checkpoint = published(name)
    layout = layouts.layout_for(checkpoint.config)
    model = [t for t in checkpoint.tensors.values() if (p := layout.place(t.name)) and p.layer_class != "mtp"]
    assert sum(t.parameters for t in model) == PUBLISHED[name].parameters
    chosen = next(load_recipe(r) for r in OURS if layout.family in load_recipe(r).families)
    assert make_plan(checkpoint, chosen).totals["parameters"] == sum(t.parameters for t in checkpoint.tensors.values())


QWEN_HYBRIDS = {
    "27B": (QWEN3_5_27B, 27_781_427_952),
    "35B-A3B": (QWEN3_5_35B_A3B, 35_951_822_704),
    "Next-80B-A3B": (QWEN3_NEXT_80B_A3B, 79_674_391_296),
}
"""Published totals: of all tensors, for Qwen3-Next those of the model class (its draft head is not counted there)."""


@pytest.mark.parametrize("name", ["27B", "35B-A3B", pytest.param("Next-80B-A3B", marks=pytest.mark.slow)])
def test_parameters_of_published_qwen_hybrids(name: str, tmp_path: Path) -> None:
    config, parameters = QWEN_HYBRIDS[name]
    folder = write_headers(tmp_path / "m", config, tensor_shapes(config), shards=18)
    assert make_plan(Checkpoint.open(folder), load_recipe("qwen-hybrid-w4a16")).totals["parameters"] == parameters


def _guide() -> dict[str, list[str]]:
    text = (recipe_folder() / "README.md").read_text(encoding="utf-8").partition("## Other families")[2]
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line]
    return {row[0].strip("`"): row[1:] for row in rows if row[0].startswith("`")}


def test_the_guide_lists_the_families_and_sizes_of_every_recipe(published: Callable[[str], Checkpoint]) -> None:
    rows = _guide()
    assert list(rows) and sorted(rows) == sorted(OURS)  # noqa: PT018
    for name, (families, example, *numbers) in rows.items():
        assert families.split(", ") == list(load_recipe(name).families)
        if example:
            plan = make_plan(published(example), load_recipe(name))
            assert numbers == [
                f"{plan.totals['output_bytes'] / 2**30:.2f}",
                f"{plan.totals['bits_per_weight']:.2f}",
                f"{plan.footprint.decode_ceiling_tps:.1f}",
            ], name


def test_granite_small_bytes_by_hand(published: Callable[[str], Checkpoint]) -> None:
    checkpoint = published("Granite-4.0-H-Small")
    plan = make_plan(checkpoint, load_recipe("granite-4-h-w4a16-fp8"))
    total = 0
    for name, header in checkpoint.tensors.items():
        size, rows = math.prod(header.shape), header.shape[0]
        if "input_linear" in name or "output_linear" in name:
            matrices = header.shape[0] * (2 if "input" in name else 1) if len(header.shape) == 3 else 1
            total += size // 2 + 2 * size // 128 + 16 * matrices
        elif re.search(r"(in|out|[qkvo])_proj\.weight", name):
            total += size + 2 * rows
        else:
            total += 2 * size
    assert plan.totals["output_bytes"] == total


# Mamba.


@pytest.mark.parametrize("case", ["nemotron_h", "granitemoehybrid", "falcon_h1", "zamba2", "bamba", "mamba2"])
@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4a16"])
def test_the_projection_with_the_time_step_has_eight_bits_at_least(case: str, scheme: str, family: Family) -> None:
    for fields in (
        {"schemes": {"ssm.in": scheme}},
        {"schemes": {"ssm.in": "fp8"}, "overrides": [{"layers": [0], "class": "ssm.in", "scheme": scheme,
                                                      "why": "the first is different"}]},
    ):  # fmt: skip
        with pytest.raises(RecipeError, match=r"ssm\.in never goes below 8 bits: the last rows .* time step"):
            recipe(case, **fields)
    good = recipe(case, schemes={"ssm.in": "w8a16", "ssm.out": scheme})
    assert planned(family(case), good).totals["modules"]
    unchecked = good.model_copy(update={"schemes": {LayerClass.SSM_IN: load_recipe("lfm2-w4a16").schemes["mlp.down"]}})
    found = refusals(family(case), unchecked)
    assert {p.what for p in found} == {f"ssm.in never goes below 8 bits: {MINIMUM_BITS[LayerClass.SSM_IN][1]}"}


def test_the_schema_knows_the_least_bits_too() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(recipe_schema())
    good = {"name": "trial", "summary": "a recipe of a test", "families": ["mamba2"], "schemes": {"ssm.in": "fp8"}}
    assert not list(validator.iter_errors(good))
    for scheme in ("w4a16", {"scheme": "nvfp4a16"}):
        assert list(validator.iter_errors({**good, "schemes": {"ssm.in": scheme}}))


@pytest.mark.parametrize("case", ["jamba", "falcon_mamba"])
@pytest.mark.parametrize("layer_class", ["ssm.in", "ssm.out"])
def test_mamba1_mixers_are_refused_with_the_reason(case: str, layer_class: str) -> None:
    reason = rf"{layer_class} stays 16-bit: the engine builds the Mamba-1 mixer without a quantization config"
    with pytest.raises(RecipeError, match=reason):
        recipe(case, schemes={layer_class: "fp8"})


def test_mamba1_mixers_are_refused_for_one_member_of_several_families(family: Family) -> None:
    both = parse_recipe({
        "name": "trial", "summary": "a recipe of a test", "families": ["jamba", "mamba2"], "schemes": {"ssm.in": "fp8"},
    })  # fmt: skip
    assert planned(family("mamba2"), both).engines == ENGINES
    found = refusals(family("jamba"), both)
    assert len(found) == 3
    assert {p.what for p in found} == {
        "vLLM 0.33: the engine builds the Mamba-1 mixer without a quantization config"
    }  # fmt: skip


@pytest.mark.parametrize(("case", "good"), [("nemotron_h", True), ("falcon_h1", False), ("zamba2", False)])
def test_ranks_must_divide_the_groups_of_a_quantized_mamba_projection(case: str, good: bool, family: Family) -> None:
    quantized, kept = (recipe(case, schemes={"ssm.in": s, "ssm.out": "fp8"}) for s in ("fp8", "keep"))
    if good:
        assert planned(family(case), quantized, tp=[2]).totals["modules"]
    else:
        found = refusals(family(case), quantized, tp=[2])
        assert found
        assert all("tensor parallel 2: its rows hold 1 groups" in p.what for p in found)
    assert planned(family(case), kept, tp=[2]).totals["modules"]


# Engine versions.

KDA = {"linear_attention.qkvz": "fp8", "experts.gate_up": "w4a16", "experts.down": "w4a16"}


def test_quantized_kda_inputs_load_in_older_versions_alone(family: Family) -> None:
    plan = planned(family("kimi_linear"), recipe("kimi_linear", schemes=KDA))
    assert plan.engines == ("0.25", "0.26")
    assert plan.as_json()["engines"] == ["0.25", "0.26"]
    assert any("does not load in vLLM 0.33: merged with the recurrence gates b and f_a" in n for n in plan.notes)
    assert planned(family("kimi_linear"), recipe("kimi_linear", schemes=KDA), engine="0.25").digest == plan.digest


def test_quantized_kda_inputs_are_refused_where_they_are_merged_with_the_gates(family: Family) -> None:
    found = refusals(family("kimi_linear"), recipe("kimi_linear", schemes=KDA), engine="0.33")
    assert {p.where for p in found} == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(3) for part in "qkv"
    }  # fmt: skip
    assert all("in_proj_qkvgfab, which stays 16-bit" in p.what for p in found)
    assert all(p.hint == "write `linear_attention.qkvz: keep`" for p in found)


@pytest.mark.parametrize(("engine", "good"), [("0.25", False), ("0.26", False), ("0.33", True), (None, True)])
def test_short_convolutions_by_version(engine: str | None, good: bool, family: Family) -> None:
    chosen = load_recipe("lfm2-w4a16-conv")
    if good:
        assert planned(family("lfm2"), chosen, engine=engine).engines == ("0.33",)
    else:
        found = refusals(family("lfm2"), chosen, engine=engine)
        assert len(found) == 4
        assert all("short convolution without a quantization config" in p.what for p in found)


def test_quantized_granite_experts_need_the_newer_loader(family: Family) -> None:
    experts = recipe("granitemoehybrid", schemes={"experts.gate_up": "w4a16", "experts.down": "w4a16"})
    assert planned(family("granitemoehybrid"), experts).engines == ("0.33",)
    assert len(refusals(family("granitemoehybrid"), experts, engine="0.26")) == 8
    assert planned(family("granitemoehybrid dense"), load_recipe("granite-4-h-w4a16-fp8")).engines == ENGINES


@pytest.mark.parametrize("layer_class", ["linear_attention.qkvz", "linear_attention.out", "mla.q", "mla.kv", "mla.out"])
def test_attention_of_glm5_next_is_refused(layer_class: str) -> None:
    with pytest.raises(RecipeError, match="of this family without a quantization config"):
        recipe("glm5_next", schemes={layer_class: "fp8"})


def test_qkv_of_qwen4_exp_is_refused_because_of_the_indexer() -> None:
    with pytest.raises(RecipeError, match="merged with the indexer's index_qk_proj"):
        recipe("qwen4_exp", schemes={"attention.qkv": "fp8"})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_version_without_the_model_class_is_refused_when_asked_for(case: str, engine: str, family: Family) -> None:
    chosen = recipe(family_of(case), schemes={"lm_head": "keep"})
    if engine in layouts.layout_for(CASES[case]).engines:
        assert engine in planned(family(case), chosen, engine=engine).engines
    else:
        (problem,) = refusals(family(case), chosen, engine=engine)
        assert problem.where == f"vLLM {engine}"
        assert re.search("came later|removed|regist", problem.what)


@pytest.mark.parametrize("case", ["bamba", "minimax", "recurrent_gemma", "mistral4"])
def test_a_family_that_no_version_runs_is_noted(case: str, family: Family) -> None:
    plan = planned(family(case), recipe(case, schemes={"lm_head": "keep"}))
    assert plan.engines == ()
    assert sum("no supported vLLM version runs this family" in note for note in plan.notes) == 1


@pytest.mark.parametrize("engine", ["0.24", "", "latest", "sglang==0.5"])
def test_an_unknown_version_is_a_usage_error(engine: str, family: Family) -> None:
    with pytest.raises(UsageError, match=r"not known|not like") as caught:
        planned(family("lfm2"), load_recipe("lfm2-w4a16"), engine=engine)
    assert caught.value.hint.startswith("known: 0.25, 0.26, 0.33")


@pytest.mark.parametrize("engine", ["vllm==0.33.0", "0.33.0", "v0.33"])
def test_a_version_may_be_spelled_as_a_package(engine: str, family: Family) -> None:
    assert planned(family("lfm2"), load_recipe("lfm2-w4a16-conv"), engine=engine).engines == ("0.33",)


def test_quantize_refuses_what_the_engine_cannot_load(family: Family, tmp_path: Path) -> None:
    for engine in ("vllm==0.25.1", "0.26"):
        with pytest.raises(PlanError, match="short convolution without a quantization config"):
            sparkquant.quantize(family("lfm2"), "lfm2-w4a16-conv", tmp_path / "out", engine=engine, method="mse")
        assert not (tmp_path / "out").exists()
    made = sparkquant.quantize(family("lfm2"), "lfm2-w4a16-conv", tmp_path / "out", engine="vllm==0.33.0", method="mse")
    assert made.report.ok


@pytest.mark.parametrize("case", ["falcon_h1", "jamba", "mamba2", "qwen4_exp"])
def test_a_head_that_the_engine_does_not_quantize_stays_and_is_noted(case: str, family: Family) -> None:
    plan = planned(family(case), recipe(case, schemes={"lm_head": "fp8"}))
    head = plan.decisions["lm_head.weight"]
    assert head.scheme is None
    assert head.because == "the engine builds lm_head of this family without a quantization config"
    assert f"lm_head stays 16-bit: {head.because}" in plan.notes


# Fusion.


@pytest.mark.parametrize("case", ["deepseek_v3", "glm_moe_dsa", "mistral4"])
def test_latent_projections_of_queries_and_keys_need_one_scheme(case: str, family: Family) -> None:
    found = refusals(family(case), recipe(case, schemes={"mla.q": "fp8", "mla.kv": "keep"}))
    assert {p.where.rpartition(".")[2] for p in found} == {"fused_qkv_a_proj"}
    assert all("one engine module with several schemes" in p.what for p in found)
    assert planned(family(case), recipe(case, schemes={"mla.q": "fp8", "mla.kv": "fp8"})).totals["modules"]["fp8"]


def test_without_a_query_rank_keys_may_stay_alone(family: Family) -> None:
    plan = planned(family("deepseek_v3 direct"), recipe("deepseek_v3", schemes={"mla.q": "fp8"}))
    assert plan.totals["modules"]["fp8"] == 2


@pytest.mark.parametrize(
    ("case", "lost"),
    [
        ("lfm2", "model.layers.1.feed_forward.w3.weight"),
        ("olmo_hybrid", "model.layers.1.linear_attn.g_proj.weight"),
        ("kimi_linear", "model.layers.2.block_sparse_moe.experts.3.w1.weight"),
        ("deepseek_v3", "model.layers.1.self_attn.q_a_proj.weight"),
        ("gemma3n", "model.layers.2.mlp.up_proj.weight"),
    ],
)
def test_a_fused_module_that_lacks_a_part_is_refused(case: str, lost: str, tmp_path: Path) -> None:
    folder = build(case, tmp_path / "m", change=lambda _, tensors: tensors.pop(lost) and None)
    found = refusals(folder, recipe(family_of(case)))
    assert lost in {p.where for p in found}


def test_layers_that_share_keys_and_values_may_lack_their_own(family: Family) -> None:
    for case in ("gemma3n", "gemma4"):
        assert planned(family(case), load_recipe("gemma-w4a16")).engines == ENGINES


# Draft heads behind the last layer.

NEXTN = ["deepseek_v3", "glm4_moe", "glm_moe_dsa", "glm5_next"]


@pytest.mark.parametrize("case", NEXTN)
def test_the_layer_behind_the_last_is_kept_and_ignored_by_number(case: str, family: Family) -> None:
    plan = planned(family(case), load_recipe("moe-w4a16-experts"))
    layers = CASES[case].get("text_config", CASES[case])["num_hidden_layers"]
    draft = [d for d in plan.decisions.values() if d.layer == layers]
    assert draft
    assert {d.layer_class for d in draft} == {LayerClass.MTP}
    assert all(d.scheme is None for d in draft)
    block = quantization_config(plan)
    assert block is not None
    ignored = [re.compile(entry.removeprefix("re:")) for entry in block["ignore"]]
    for number, expected in ((layers, True), (layers + 7, True), (layers - 1, False), (0, False)):
        name = f"model.layers.{number}.mlp.experts.0.gate_proj"
        assert any(pattern.match(name) for pattern in ignored) == expected, number


@pytest.mark.parametrize("case", NEXTN)
def test_a_lost_draft_layer_is_noted(case: str, tmp_path: Path) -> None:
    layers = CASES[case].get("text_config", CASES[case])["num_hidden_layers"]

    def drop(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if f".layers.{layers}." in n]:
            del tensors[name]

    plan = planned(build(case, tmp_path / "m", change=drop), recipe(case))
    (note,) = [note for note in plan.notes if "draft head" in note]
    assert "num_nextn_predict_layers" in note
    assert "no layer behind the last one" in note


def test_towers_with_more_layers_than_the_decoder_do_not_confuse_the_count(family: Family) -> None:
    assert (
        CASES["mistral4"]["vision_config"]["num_hidden_layers"] > CASES["mistral4"]["text_config"]["num_hidden_layers"]
    )
    assert planned(family("mistral4"), load_recipe("moe-w4a16-fp8")).totals["modules"]["w4a16 g128"] == 12


# Sizes and groups.


def test_nemotron_nano_experts_need_groups_of_64(published: Callable[[str], Checkpoint]) -> None:
    checkpoint = published("Nemotron-3-Nano-30B-A3B")
    with pytest.raises(PlanError) as caught:
        make_plan(checkpoint, recipe("nemotron_h", schemes={"experts.gate_up": "w4a16", "experts.down": "w4a16"}))
    assert {p.what for p in caught.value.problems} == {"K=1856 is not a multiple of the group size 128"}
    plan = make_plan(checkpoint, load_recipe("nemotron-h-w4a16-fp8"))
    assert plan.totals["modules"]["w4a16 g64"] == 23 * 128 * 2
    assert make_plan(checkpoint, load_recipe("nemotron-h-nvfp4-fp8")).totals["modules"]["nvfp4a16"] == 23 * 128 * 2


def test_decode_bytes_count_active_experts_alone(published: Callable[[str], Checkpoint]) -> None:
    checkpoint = published("Kimi-Linear-48B-A3B")
    plan = make_plan(checkpoint, recipe("kimi_linear"))
    routed = sum(d.output_bytes for d in plan.decisions.values() if str(d.layer_class).startswith("experts."))
    embed = plan.decisions["model.embed_tokens.weight"].output_bytes
    expected = plan.totals["output_bytes"] - embed - routed + routed * 8 / 256
    assert plan.footprint.decode_bytes == round(expected)
    active = plan.footprint.decode_bytes / 2
    assert 2.5e9 < active < 3.5e9, "an A3B model reads about three billion parameters a token"


@pytest.mark.parametrize("case", ["kimi_linear", "nemotron_h", "glm5_next"])
def test_unknown_tensors_name_the_file_to_edit(case: str, tmp_path: Path) -> None:
    def add(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.h_proj.weight"] = ("BF16", (1, 1), b"\0\0")

    with pytest.raises(UnknownTensor) as caught:
        planned(build(case, tmp_path / "m", change=add), recipe(case))
    assert f"sparkquant/layouts/{case}.py" in caught.value.hint


@pytest.mark.parametrize("case", CASES)
def test_a_plan_and_its_table_of_kernels_refuse_the_same_sizes(case: str, family: Family) -> None:
    source = family(case)
    for name in (name for name in recipe_names() if family_of(case) in load_recipe(name).families):
        made = sparkquant.plan(source, name)
        for size in (2, 4) if made.engines else ():
            rows = kernel_rows(made, made.engines[-1], (size,), made.recipe.target.capability)
            refused = [row["reason"] for row in rows if row["kernel"] == "refused"]
            options = {"tp": (size,), "engine": made.engines[-1]}
            if refused:
                with pytest.raises(PlanError):
                    sparkquant.plan(source, name, **options)
            else:
                assert sparkquant.plan(source, name, **options).digest == made.digest, f"{name}, tp {size}"
