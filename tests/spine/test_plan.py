"""The plan: golden numbers of the 27B, stability, the shard map, and every refusal before any work."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant import planning
from sparkquant.checkpoint import Checkpoint, TensorHeader
from sparkquant.decisions import Decision, Plan
from sparkquant.errors import PlanError, Problem, QuantizedSource, RecipeError, UnknownTensor, UsageError
from sparkquant.layers import PROTECTED, LayerClass, Layout, MtpRule, TensorRule
from sparkquant.planning import make_plan
from sparkquant.recipe import Recipe, parse_recipe
from sparkquant.recipe_files import load_recipe, recipe_names
from tests.checkpoints import RawTensors, build, hybrid_recipes
from tests.data import published
from tests.data.shapes import Shapes, tensor_shapes

Checkpoints = Callable[..., Path]
GIB = 2**30
ROOT = Path(__file__).resolve().parent.parent.parent


def recipe(families: str = "qwen3_5 qwen3_5_moe qwen3_next", **fields: Any) -> Recipe:
    """A recipe from keyword arguments; class names are spelled with `__` for the dot in `schemes`."""
    return parse_recipe(
        {"name": "trial", "summary": "a recipe of a test", "families": families.split(), "schemes": {"mlp.down": "fp8"}}
        | fields
    )


def refusals(folder: Path, chosen: Recipe, **options: Any) -> list[Problem]:
    """All problems of a plan that must be refused."""
    with pytest.raises(PlanError) as caught:
        make_plan(Checkpoint.open(folder), chosen, **options)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return list(caught.value.problems)


@pytest.fixture(scope="module")
def folder_27b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3.5-27B as headers over 18 sparse shards."""
    folder = tmp_path_factory.mktemp("qwen3_5_27b")
    return published.write_headers(folder, published.QWEN3_5_27B, published.qwen3_5_27b_shapes(), shards=18)


@pytest.fixture(scope="module")
def plans_27b(folder_27b: Path) -> Mapping[str, Plan]:
    """A plan of the 27B for every shipped recipe of its family."""
    checkpoint = Checkpoint.open(folder_27b)
    chosen = {name: load_recipe(name) for name in recipe_names()}
    return {name: make_plan(checkpoint, r) for name, r in chosen.items() if "qwen3_5" in r.families}


# Golden numbers.


def test_27b_totals_and_modules(plans_27b: Mapping[str, Plan]) -> None:
    totals = plans_27b["qwen-hybrid-nvfp4-fp8"].totals
    assert totals["tensors"] == 1199
    assert totals["parameters"] == 27_781_427_952
    assert totals["source_bytes"] == 55_562_855_904
    assert totals["modules"] == {"fp8": 208, "keep": 257, "nvfp4a16": 193}
    assert totals["draft_head_tensors"] == 15


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("qwen-hybrid-w4a16", 18.12),
        ("qwen-hybrid-w4a16-head", 16.36),
        ("qwen-hybrid-nvfp4-fp8", 20.42),
        ("qwen-hybrid-nvfp4a16-mlp", 28.84),
    ],
)
def test_27b_sizes(plans_27b: Mapping[str, Plan], name: str, gib: float) -> None:
    assert round(plans_27b[name].totals["output_bytes"] / GIB, 2) == gib


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("qwen-hybrid-fp8", 31_238_862_304),
        ("qwen-hybrid-fp8-mtp", 30_866_663_264),
        ("qwen-hybrid-nvfp4a16-mlp", 30_963_263_712),
    ],
)
def test_27b_sizes_to_the_byte(plans_27b: Mapping[str, Plan], name: str, size: int) -> None:
    assert plans_27b[name].totals["output_bytes"] == size


def test_27b_fp8_with_fp8_draft_head_is_laid_out_like_the_official_file(plans_27b: Mapping[str, Plan]) -> None:
    plan = plans_27b["qwen-hybrid-fp8-mtp"]
    stored = [tensor for decision in plan.decisions.values() for tensor in decision.stored()]
    assert plan.totals["output_tensors"] == len(stored) == 1606
    assert sum(tensor.dtype == "F8_E4M3" for tensor in stored) == 407
    draft = {tensor.name: tensor.dtype for tensor in stored if tensor.name.startswith("mtp.")}
    assert len(draft) == 22
    assert sorted(draft.values()).count("F8_E4M3") == 7
    assert draft["mtp.fc.weight"] == "BF16"
    assert "mtp.fc.weight_scale" not in draft


def _bytes_by_hand(shapes: Shapes, scheme_of: Callable[[str], str]) -> int:
    """Stored bytes from shapes alone, with the arithmetic of each format written out once more."""
    total = 0.0
    for name, shape in shapes.items():
        elements, rows = math.prod(shape), shape[0]
        total += {
            "keep": 2 * elements,
            "w4a16": elements / 2 + 2 * elements / 128 + 16,
            "w8a16": elements + 2 * elements / 128 + 16,
            "fp8": elements + 2 * rows,
            "nvfp4a16": elements / 2 + elements / 16 + 4,
        }[scheme_of(name)]
    return round(total)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen-hybrid-w4a16", {"attention": "w4a16", "net": "w4a16", "mlp": "w4a16", "head": "keep"}),
        ("qwen-hybrid-w4a16-head", {"attention": "w4a16", "net": "w4a16", "mlp": "w4a16", "head": "w4a16"}),
        ("qwen-hybrid-w4a16-fp8", {"attention": "fp8", "net": "fp8", "mlp": "w4a16", "head": "w8a16"}),
        ("qwen-hybrid-nvfp4-fp8", {"attention": "fp8", "net": "fp8", "mlp": "nvfp4a16", "head": "nvfp4a16"}),
        ("qwen-hybrid-nvfp4a16-mlp", {"attention": "keep", "net": "keep", "mlp": "nvfp4a16", "head": "keep"}),
    ],
)
def test_27b_bytes_equal_the_arithmetic_on_paper(
    plans_27b: Mapping[str, Plan], name: str, kinds: dict[str, str]
) -> None:
    def scheme_of(tensor: str) -> str:
        decoder = tensor.startswith("model.language_model.layers.")
        if tensor == "lm_head.weight":
            return kinds["head"]
        if decoder and re.search(r"self_attn\.[qkvo]_proj", tensor):
            return kinds["attention"]
        if decoder and re.search(r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.", tensor):
            return kinds["net"]
        return kinds["mlp"] if decoder and ".mlp." in tensor else "keep"

    assert plans_27b[name].totals["output_bytes"] == _bytes_by_hand(published.qwen3_5_27b_shapes(), scheme_of)


def test_27b_decode_bytes_leave_out_what_a_token_does_not_read(plans_27b: Mapping[str, Plan]) -> None:
    plan = plans_27b["qwen-hybrid-w4a16"]
    unread = ("model.language_model.embed_tokens", "model.visual.", "mtp.")
    read = sum(d.output_bytes for name, d in plan.decisions.items() if not name.startswith(unread))
    assert plan.footprint.decode_bytes == read
    assert plan.footprint.decode_ceiling_tps == round(273e9 / read, 1)
    assert plan.footprint.disk_bytes == plan.totals["output_bytes"]
    largest = 2 * 2 * 17408 * 5120  # gate and up of one layer in BF16
    assert plan.footprint.working_bytes == 3 * largest + 256 * 2**20


@pytest.mark.parametrize(("fused", "layers"), [(True, 40), (False, 4)])
def test_decode_bytes_of_a_mixture_count_active_experts_only(tmp_path: Path, fused: bool, layers: int) -> None:
    config = json.loads(json.dumps(published.QWEN3_5_35B_A3B))
    config["text_config"]["num_hidden_layers"] = layers
    folder = published.write_headers(tmp_path / "moe", config, tensor_shapes(config, fused_experts=fused))
    plan = make_plan(Checkpoint.open(folder), load_recipe("qwen-hybrid-w4a16"))
    assert layers != 40 or plan.totals["parameters"] == published.QWEN3_5_35B_A3B_PARAMETERS
    experts = layers * 256 * sum(d.output_bytes for d in _one_expert(plan, fused)) // (256 if fused else 1)
    unread = ("model.language_model.embed_tokens", "model.visual.", "mtp.")
    everything = sum(d.output_bytes for name, d in plan.decisions.items() if not name.startswith(unread))
    assert plan.footprint.decode_bytes == everything - experts + experts * 8 // 256
    full = layers // 4
    linears = layers * 3 * 256 + layers * 3 + full * 4 + 3 * full * 3
    assert plan.totals["modules"]["w4a16 g128"] == linears
    # One expert is 3 x [512, 2048] in int4 with a BF16 scale for 128 weights and a shape of 16 bytes each.
    assert experts == layers * 256 * 3 * (512 * 2048 // 2 + 512 * 2048 // 64 + 16)


def _one_expert(plan: Plan, fused: bool) -> list[Decision]:
    at = "model.language_model.layers.0.mlp.experts" + ("" if fused else ".0")
    return [d for name, d in plan.decisions.items() if name.startswith(f"{at}.")]


def test_a_tied_head_is_read_for_every_token(checkpoints: Checkpoints) -> None:
    tied = make_plan(Checkpoint.open(checkpoints("qwen3_5_text", tied=True)), load_recipe("qwen-hybrid-w4a16"))
    untied = make_plan(Checkpoint.open(checkpoints("qwen3_5_text")), load_recipe("qwen-hybrid-w4a16"))
    assert tied.footprint.decode_bytes == untied.footprint.decode_bytes


def test_an_unknown_chip_has_no_ceiling(checkpoints: Checkpoints) -> None:
    plan = make_plan(Checkpoint.open(checkpoints("qwen3_5")), recipe(target={"capability": "9.0"}))
    assert plan.footprint.bandwidth_gbps is None
    assert plan.footprint.decode_ceiling_tps is None


# Properties of every plan.

PLANS = [
    (name, model_type, tied)
    for name in hybrid_recipes()
    for model_type in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
    for tied in (False, True)
    if not (tied and LayerClass.LM_HEAD in load_recipe(name).schemes)
]


@pytest.mark.parametrize(("name", "model_type", "tied"), PLANS)
def test_every_tensor_has_one_fate_and_bytes_add_up(
    name: str, model_type: str, tied: bool, checkpoints: Checkpoints
) -> None:
    checkpoint = Checkpoint.open(checkpoints(model_type, tied=tied))
    chosen = load_recipe(name)
    plan = make_plan(checkpoint, chosen)
    assert list(plan.decisions) == list(checkpoint.tensors)
    stored = [tensor for decision in plan.decisions.values() for tensor in decision.stored()]
    assert len({tensor.name for tensor in stored}) == len(stored) == plan.totals["output_tensors"]
    assert sum(tensor.bytes for tensor in stored) == plan.totals["output_bytes"] == sum(s.bytes for s in plan.shards)
    assert plan.totals["output_bytes"] == sum(row["output_bytes"] for row in plan.by_class)
    assert plan.totals["parameters"] == sum(t.parameters for t in checkpoint.tensors.values())
    assert plan.totals["source_bytes"] == sum(t.bytes for t in checkpoint.tensors.values())
    groups: dict[str, set[str]] = defaultdict(set)
    for decision in plan.decisions.values():
        assert decision.because
        if decision.layer_class in PROTECTED and decision.layer_class not in chosen.unprotect:
            assert decision.scheme is None
        if decision.scheme is None:
            header = checkpoint.tensors[decision.tensor]
            assert [(t.name, t.dtype, t.shape) for t in decision.outputs] == [(header.name, header.dtype, header.shape)]
        if decision.group:
            groups[decision.group].add(decision.scheme.label if decision.scheme else "keep")
    assert all(len(labels) == 1 for labels in groups.values())


def test_fused_experts_are_planned_as_one_linear_per_expert(checkpoints: Checkpoints) -> None:
    plan = make_plan(Checkpoint.open(checkpoints("qwen3_5_moe")), load_recipe("qwen-hybrid-nvfp4-fp8"))
    decision = plan.decisions["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    assert (decision.experts, decision.modules, decision.parts) == (4, 8, ("gate_proj", "up_proj"))
    stored = {tensor.name: tensor for tensor in decision.stored()}
    at = "model.language_model.layers.0.mlp.experts"
    assert set(stored) == {
        f"{at}.{expert}.{part}_proj.{kind}"
        for expert in range(4)
        for part in ("gate", "up")
        for kind in ("weight_packed", "weight_scale", "weight_global_scale")
    }
    assert stored[f"{at}.3.up_proj.weight_packed"].shape == (128, 128)
    assert decision.output_bytes == sum(tensor.bytes for tensor in stored.values())
    per_expert = make_plan(
        Checkpoint.open(checkpoints("qwen3_5_moe", fused_experts=False)), load_recipe("qwen-hybrid-nvfp4-fp8")
    )
    names = {t.name for d in per_expert.decisions.values() for t in d.stored() if not t.name.startswith("mtp.")}
    assert names == {t.name for d in plan.decisions.values() for t in d.stored() if not t.name.startswith("mtp.")}
    assert per_expert.totals["output_bytes"] == plan.totals["output_bytes"]
    assert per_expert.totals["modules"]["nvfp4a16"] == plan.totals["modules"]["nvfp4a16"]


def test_state_keeps_its_own_dtype(checkpoints: Checkpoints) -> None:
    plan = make_plan(Checkpoint.open(checkpoints("qwen3_5", float32_state=True)), load_recipe("qwen-hybrid-w4a16"))
    at = "model.language_model.layers.0.linear_attn"
    assert [plan.decisions[f"{at}.{n}"].outputs[0].dtype for n in ("A_log", "dt_bias", "norm.weight")] == [
        "F32",
        "BF16",
        "F32",
    ]


_NEXT = ("qwen3_next", "qwen-hybrid-nvfp4-fp8")
_MOE = ("qwen3_5_moe", "qwen-hybrid-fp8-mtp")


@given(limit=st.integers(1, 3_000_000) | st.sampled_from([1, 10**12]), case=st.sampled_from([_NEXT, _MOE]))
def test_the_shard_map_is_a_partition_that_keeps_groups_together(
    limit: int, case: tuple[str, str], checkpoints: Checkpoints
) -> None:
    plan = make_plan(Checkpoint.open(checkpoints(case[0], shards=3)), load_recipe(case[1]), shard_bytes=limit)
    placed = [name for shard in plan.shards for name in shard.tensors]
    assert sorted(placed) == sorted(plan.decisions)
    home = {name: shard.name for shard in plan.shards for name in shard.tensors}
    groups: dict[str, set[str]] = defaultdict(set)
    for name, decision in plan.decisions.items():
        if decision.scheme is not None:
            groups[decision.scale_group].add(home[name])
    assert all(len(names) == 1 for names in groups.values())
    for shard in plan.shards:
        assert shard.bytes == sum(plan.decisions[name].output_bytes for name in shard.tensors)
        units = {plan.decisions[n].scale_group if plan.decisions[n].scheme else n for n in shard.tensors}
        assert shard.bytes <= limit or len(units) == 1
    count = len(plan.shards)
    names = [shard.name for shard in plan.shards]
    assert names == (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )


@pytest.mark.parametrize("limit", [0, -1])
def test_a_shard_size_must_be_positive(checkpoints: Checkpoints, limit: int) -> None:
    with pytest.raises(UsageError, match=f"shard size {limit} is not positive"):
        make_plan(Checkpoint.open(checkpoints("qwen3_5")), recipe(), shard_bytes=limit)


_RUN = """
import json, re, sys, time
from pathlib import Path
before = time.process_time()
import sparkquant
plan = sparkquant.plan(sys.argv[1], sys.argv[2])
text = plan.to_json()
spent = time.process_time()
heavy = sorted({"torch", "transformers", "numba", "numpy", "compressed_tensors"} & set(sys.modules))
print(json.dumps({"digest": plan.digest, "text": text, "heavy": heavy, "cpu": spent, "spent": spent - before,
                  "rss": 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])}))
"""


def _fresh_plan(folder: Path, name: str, seed: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(folder), name], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_plan_in_a_fresh_process_is_stable_light_and_quick(folder_27b: Path, plans_27b: Mapping[str, Plan]) -> None:
    runs = [_fresh_plan(folder_27b, "qwen-hybrid-nvfp4-fp8", seed) for seed in ("1", "4242")]
    here = plans_27b["qwen-hybrid-nvfp4-fp8"]
    assert runs[0]["text"] == runs[1]["text"] == here.to_json()
    assert runs[0]["digest"] == runs[1]["digest"] == here.digest
    for run in runs:
        assert run["heavy"] == []
        assert run["rss"] < 150e6
    # The promise is half a second of wall time on an idle machine; processor time is what a busy one can still measure.
    assert min(run["cpu"] for run in runs) < 1.0


def test_the_digest_follows_recipe_method_shards_and_source(tmp_path: Path, checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3_5")
    plan = make_plan(Checkpoint.open(folder), recipe())
    assert make_plan(Checkpoint.open(folder), recipe()).digest == plan.digest
    others = [
        make_plan(Checkpoint.open(folder), recipe().with_method("rtn")),
        make_plan(Checkpoint.open(folder), recipe(), shard_bytes=10**6),
        make_plan(Checkpoint.open(folder), recipe(summary="another recipe of a test")),
        make_plan(Checkpoint.open(build("qwen3_5", tmp_path / "x", layers=3)), recipe()),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 5
    moved = make_plan(Checkpoint.open(build("qwen3_5", tmp_path / "moved")), recipe())
    assert moved.digest == plan.digest, "where a checkpoint lies does not matter"
    assert str(tmp_path) not in moved.to_json()


def test_the_json_is_complete_and_plain(checkpoints: Checkpoints) -> None:
    plan = make_plan(Checkpoint.open(checkpoints("qwen3_5_moe")), load_recipe("qwen-hybrid-w4a16"))
    value = json.loads(plan.to_json(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert value["format"] == 1
    assert [d["tensor"] for d in value["decisions"]] == list(plan.decisions)
    assert value["totals"] == plan.totals
    assert parse_recipe(value["recipe"]).as_json() == plan.recipe.as_json()
    fused = next(d for d in value["decisions"] if d["tensor"].endswith("0.mlp.experts.down_proj"))
    assert fused["experts"] == 4
    assert fused["scheme"] == {"scheme": "w4a16", "group_size": 128, "symmetric": True}
    gate = next(d for d in value["decisions"] if d["tensor"].endswith("in_proj_a.weight"))
    assert gate["scheme"] == "keep"
    assert "accumulate" in gate["because"]


# Refusals.


@pytest.mark.parametrize("layer_class", sorted(PROTECTED))
def test_a_scheme_for_a_protected_class_is_refused(layer_class: LayerClass) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(schemes={str(layer_class): "w4a16"})
    assert f"{layer_class} is protected: {PROTECTED[layer_class]}" in str(caught.value)
    with pytest.raises(RecipeError, match="is protected"):
        recipe(overrides=[{"layers": [0], "class": str(layer_class), "scheme": "fp8", "why": "to see it refused"}])


@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4a16", {"scheme": "w4a16", "group_size": 32}])
def test_a_four_bit_draft_head_cannot_be_spelled(scheme: Any) -> None:
    with pytest.raises(RecipeError, match="a protected class never goes below 8 bits"):
        recipe(unprotect={"mtp": {"scheme": scheme, "why": "it would be smaller"}})
    with pytest.raises(RecipeError, match="mtp is protected") as caught:
        recipe(schemes={"mtp": scheme})
    assert "unprotect: {mtp: {scheme: fp8, why: ...}}" in str(caught.value)


@pytest.mark.parametrize("layer_class", ["vision", "linear_attention.gates", "router", "mlp.down"])
def test_only_the_draft_head_can_be_unprotected(layer_class: str) -> None:
    with pytest.raises(RecipeError, match=f"{layer_class} cannot be unprotected") as caught:
        recipe(unprotect={layer_class: {"scheme": "fp8", "why": "it would be smaller"}})
    assert "only mtp can" in str(caught.value)


@pytest.mark.parametrize(
    ("part", "whole"),
    [("attention.q", "attention.qkv"), ("attention.k", "attention.qkv"), ("mlp.gate", "mlp.gate_up"),
     ("linear_attention.z", "linear_attention.qkvz"), ("experts.up", "experts.gate_up")],
)  # fmt: skip
def test_parts_of_a_fused_module_have_no_scheme_of_their_own(part: str, whole: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(schemes={part: "fp8"})
    assert f"{part!r} is not a class of its own" in str(caught.value)
    assert f"name {whole!r}" in str(caught.value)


def test_a_group_size_that_does_not_divide_k_names_every_tensor(tmp_path: Path) -> None:
    def narrow(config: dict[str, Any], tensors: RawTensors) -> None:
        config["text_config"]["intermediate_size"] = 320
        for name in [n for n in tensors if re.search(r"\.layers\.\d\.mlp\.", n)]:
            shape = (256, 320) if "down_proj" in name else (320, 256)
            tensors[name] = ("BF16", shape, bytes(2 * 256 * 320))

    folder = build("qwen3_5", tmp_path / "m", change=narrow)
    problems = refusals(folder, load_recipe("qwen-hybrid-w4a16"))
    assert [(p.where, p.what) for p in problems] == [
        (f"model.language_model.layers.{n}.mlp.down_proj.weight", "K=320 is not a multiple of the group size 128")
        for n in range(4)
    ]
    assert "`mlp.down: {scheme: w4a16, group_size: 32}`" in problems[0].hint
    fits = recipe(schemes={"mlp.down": {"scheme": "w4a16", "group_size": 32}})
    assert make_plan(Checkpoint.open(folder), fits).totals["modules"]["w4a16 g32"] == 4


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_next"])
def test_a_tied_head_cannot_have_a_scheme(model_type: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(model_type, tied=True)
    assert [str(problem) for problem in refusals(folder, load_recipe("qwen-hybrid-nvfp4-fp8"))] == [
        "lm_head: is tied to the embedding and cannot have a scheme; write `lm_head: keep`"
    ]
    assert "lm_head.weight" not in make_plan(Checkpoint.open(folder), load_recipe("qwen-hybrid-w4a16")).decisions


def test_a_stored_head_that_is_tied_cannot_have_a_scheme(tmp_path: Path) -> None:
    stored = build("qwen3_5", tmp_path / "m", change=lambda config, _: config.update(tie_word_embeddings=True))
    assert [problem.where for problem in refusals(stored, load_recipe("qwen-hybrid-nvfp4-fp8"))] == ["lm_head"]
    kept = make_plan(Checkpoint.open(stored), load_recipe("qwen-hybrid-w4a16"))
    assert any("ties lm_head to the embedding, yet an lm_head.weight is stored" in note for note in kept.notes)


@pytest.mark.parametrize(
    ("model_type", "lost"),
    [
        ("qwen3_5", "linear_attn.in_proj_z.weight"),
        ("qwen3_5", "self_attn.v_proj.weight"),
        ("qwen3_5", "mlp.up_proj.weight"),
        ("qwen3_next", "mlp.experts.1.gate_proj.weight"),
    ],
)
def test_a_fused_module_that_lacks_a_part_is_refused(model_type: str, lost: str, tmp_path: Path) -> None:
    def lose(config: dict[str, Any], tensors: RawTensors) -> None:
        candidates = [name for name in tensors if name.endswith(lost) and not name.startswith("mtp.")]
        gone.append(candidates[0])
        del tensors[candidates[0]]

    gone: list[str] = []
    folder = build(model_type, tmp_path / "m", layers=8, change=lose)
    problems = refusals(folder, load_recipe("qwen-hybrid-w4a16"))
    assert [problem.where for problem in problems] == gone
    assert "missing" in problems[0].what


def _to_block_fp8(config: dict[str, Any], tensors: RawTensors) -> None:
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for name in [n for n in tensors if n.endswith("mlp.down_proj.weight")]:
        shape = tensors[name][1]
        tensors[name] = ("F8_E4M3", shape, bytes(math.prod(shape)))
        tensors[f"{name}_scale_inv"] = (
            "BF16",
            (shape[0] // 128, shape[1] // 128),
            bytes(2 * math.prod(shape) // 128**2),
        )


def test_a_block_fp8_source_is_refused(tmp_path: Path) -> None:
    folder = build("qwen3_5", tmp_path / "m", change=_to_block_fp8)
    with pytest.raises(QuantizedSource) as caught:
        make_plan(Checkpoint.open(folder), load_recipe("qwen-hybrid-w4a16"))
    assert "is quantized already (quant_method 'fp8'" in caught.value.what
    assert "mlp.down_proj.weight_scale_inv" in caught.value.what
    assert caught.value.exit_code == 3


def _add_scale(config: dict[str, Any], tensors: RawTensors) -> None:
    tensors["model.language_model.layers.0.mlp.down_proj.weight_scale"] = ("BF16", (256, 1), bytes(512))


def _make_fp8(config: dict[str, Any], tensors: RawTensors) -> None:
    tensors["lm_head.weight"] = ("F8_E4M3", (512, 256), bytes(512 * 256))


@pytest.mark.parametrize(
    "change",
    [
        lambda config, _: config.update(quantization_config={"quant_method": "compressed-tensors"}),
        lambda config, _: config["text_config"].update(quantization_config={"quant_method": "modelopt"}),
        lambda config, _: config.update(quantization_config="awq"),
        _add_scale,
        _make_fp8,
    ],
)
def test_any_sign_of_quantization_is_refused(tmp_path: Path, change: Callable[..., None]) -> None:
    folder = build("qwen3_5", tmp_path / "m", layers=1, vision=False, change=change)
    with pytest.raises(QuantizedSource, match="is quantized already") as caught:
        make_plan(Checkpoint.open(folder), recipe())
    assert "16-bit checkpoint" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "where", "what"),
    [
        ({"dtype": "F16"}, "lm_head.weight", "weights are float16"),
        ({"change": lambda c, _: c.update(dtype="float16")}, "config.json", "config.json asks for float16"),
        ({"change": lambda c, _: (c.pop("dtype"), c["text_config"].update(dtype="float16"))}, "config.json", "float16"),
        ({"change": lambda c, _: (c.pop("dtype"), c.update(torch_dtype="float16"))}, "config.json", "float16"),
    ],
)
def test_float16_is_refused(tmp_path: Path, options: dict[str, Any], where: str, what: str) -> None:
    problems = refusals(build("qwen3_5", tmp_path / "m", **options), load_recipe("qwen-hybrid-w4a16"))
    assert len(problems) == 1
    assert problems[0].where == where
    assert what in problems[0].what
    assert "bfloat16" in problems[0].hint


def test_an_override_that_hits_nothing_says_what_it_could_hit(checkpoints: Checkpoints) -> None:
    chosen = recipe(
        schemes={"attention.qkv": "fp8"},
        overrides=[
            {"layers": [0, 3], "class": "attention.qkv", "scheme": "w4a16", "why": "layer 0 is a delta net"},
            {"layers": [9], "class": "mlp.down", "scheme": "keep", "why": "there is no layer 9"},
            {"layers": [0], "class": "lm_head", "scheme": "fp8", "why": "the head is in no layer"},
            {"layers": [0], "class": "experts.down", "scheme": "fp8", "why": "a dense model has none"},
        ],
    )
    assert [(p.what, p.hint) for p in refusals(checkpoints("qwen3_5", layers=8), chosen)] == [
        ("override of attention.qkv in layer 0 hits nothing", "layers with it: 3, 7"),
        ("override of mlp.down in layer 9 hits nothing", "layers with it: 0-7"),
        ("override of lm_head in layer 0 hits nothing", "this checkpoint has no such class"),
        ("override of experts.down in layer 0 hits nothing", "this checkpoint has no such class"),
    ]


def test_an_override_changes_its_layers_alone(checkpoints: Checkpoints) -> None:
    chosen = recipe(
        schemes={"mlp.down": "w4a16"},
        overrides=[{"layers": [0, 3], "class": "mlp.down", "scheme": "fp8", "why": "first and last are sensitive"}],
    )
    plan = make_plan(Checkpoint.open(checkpoints("qwen3_5")), chosen)
    at = "model.language_model.layers"
    found = {i: plan.decisions[f"{at}.{i}.mlp.down_proj.weight"] for i in range(4)}
    assert [d.scheme.label if d.scheme else "" for d in found.values()] == ["fp8", "w4a16 g128", "w4a16 g128", "fp8"]
    assert found[0].because == "override: first and last are sensitive"
    assert plan.decisions["mtp.layers.0.mlp.down_proj.weight"].scheme is None, (
        "layer 0 of the draft head is another layer"
    )


def test_a_recipe_of_another_family_is_refused(checkpoints: Checkpoints) -> None:
    problems = refusals(checkpoints("qwen3_next"), recipe(families="qwen3_5"))
    assert [p.what for p in problems] == ["is for qwen3_5; this checkpoint is qwen3_next"]


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    def add(config: dict[str, Any], tensors: RawTensors) -> None:
        tensors["model.language_model.layers.0.linear_attn.in_proj_new.weight"] = ("BF16", (2, 256), bytes(1024))

    with pytest.raises(UnknownTensor) as caught:
        make_plan(Checkpoint.open(build("qwen3_5", tmp_path / "m", change=add)), recipe())
    assert "model.language_model.layers.0.linear_attn.in_proj_new.weight" in str(caught.value)


def test_a_tensor_parallel_size_that_cuts_groups_is_refused_on_demand_and_else_noted(checkpoints: Checkpoints) -> None:
    checkpoint = Checkpoint.open(checkpoints("qwen3_5_moe"))
    chosen = load_recipe("qwen-hybrid-w4a16")
    plan = make_plan(checkpoint, chosen)
    assert any(note.startswith("not servable with tensor parallel 2: ") for note in plan.notes)
    assert make_plan(checkpoint, chosen, tp=[1]).digest == plan.digest
    problems = refusals(checkpoint.path, chosen, tp=[1, 2])
    at = "model.language_model.layers"
    assert [p.where for p in problems] == sorted(
        f"{at}.{i}.mlp.{part}" for i in range(4) for part in ("experts.down_proj", "shared_expert.down_proj.weight")
    )
    assert {p.what for p in problems} == {
        "tensor parallel 2: K=128 over 2 ranks = 64 is not a multiple of the group size 128"
    }
    both = refusals(checkpoint.path, chosen, tp=[2, 3])
    assert any(p.what.startswith("tensor parallel 3: ") for p in both)
    assert len(both) > len(problems)


@pytest.mark.parametrize("size", [0, -2])
def test_a_tensor_parallel_size_must_be_positive(checkpoints: Checkpoints, size: int) -> None:
    with pytest.raises(UsageError, match=f"tensor-parallel size {size} is not positive"):
        make_plan(Checkpoint.open(checkpoints("qwen3_5")), recipe(), tp=[1, size])


def test_the_27b_serves_with_two_and_four_ranks(folder_27b: Path) -> None:
    checkpoint = Checkpoint.open(folder_27b)
    for name in ("qwen-hybrid-w4a16", "qwen-hybrid-nvfp4-fp8", "qwen-hybrid-w4a16-fp8", "qwen-hybrid-fp8"):
        make_plan(checkpoint, load_recipe(name), tp=[1, 2, 4])


def test_experts_of_a_layer_need_one_scheme(checkpoints: Checkpoints) -> None:
    chosen = recipe(schemes={"experts.gate_up": "w4a16", "experts.down": "w8a16"})
    for model_type, at in (("qwen3_next", "model.layers"), ("qwen3_5_moe", "model.language_model.layers")):
        problems = refusals(checkpoints(model_type), chosen)
        assert [p.where for p in problems] == [f"{at}.{i}.mlp.experts" for i in range(4)]
        assert "one engine module with several schemes" in problems[0].what
        assert "w4a16 g128" in problems[0].what
        assert "w8a16 g128" in problems[0].what
    half = recipe(schemes={"experts.gate_up": "fp8"})
    assert len(refusals(checkpoints("qwen3_5_moe"), half)) == 4, "quantized beside 16-bit is mixed too"


def test_a_group_that_spans_two_classes_needs_one_scheme(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layout(config: Mapping[str, Any], *, source: str = "") -> Layout:
        at = r"model\.layers\.\d+\.self_attn"
        rules = (
            TensorRule(rf"{at}\.[qk]_proj\.weight", LayerClass.ATTENTION_QKV, fused="qkv_proj", linear=True),
            TensorRule(rf"{at}\.v_proj\.weight", LayerClass.ATTENTION_OUT, fused="qkv_proj", linear=True),
            TensorRule(rf"(?!{at}\.[qkv]_proj).*", LayerClass.STATE),
        )
        return Layout("qwen3_5", rules, MtpRule(declared=False, config_key=""), ())

    monkeypatch.setattr(planning, "layout_for", layout)
    monkeypatch.setattr(planning, "structure_faults", lambda *_: ())  # most of this layout is one class
    folder = checkpoints("qwen3_5_text")
    problems = refusals(folder, recipe(schemes={"attention.qkv": "w4a16", "attention.out": "fp8"}))
    assert [p.where for p in problems] == ["model.layers.3.self_attn.qkv_proj"]
    assert "k_proj: w4a16 g128, model.layers.3.self_attn.v_proj: fp8" in problems[0].what
    same = recipe(schemes={"attention.qkv": "fp8", "attention.out": "fp8"})
    assert make_plan(Checkpoint.open(folder), same).totals["modules"]["fp8"] == 3


def _lose_layers(config: dict[str, Any], tensors: RawTensors) -> None:
    for name in [n for n in tensors if re.search(r"^model.*layers\.[125]\.", n)]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_lose_layers, "declares 8 layers, yet tensors exist for layers 0, 3-4, 6-7"),
        (
            lambda c, _: c["text_config"].update(num_hidden_layers=9),
            "declares 9 layers, yet tensors exist for layers 0-7",
        ),
        (
            lambda c, _: c["text_config"].update(num_hidden_layers=7),
            "declares 7 layers, yet tensors exist for layers 0-7",
        ),
        (lambda c, _: c["text_config"].update(num_hidden_layers=10**15), f"declares {10**15} layers"),
    ],
)
def test_layers_must_be_those_of_the_config(tmp_path: Path, change: Callable[..., None], what: str) -> None:
    problems = refusals(build("qwen3_5", tmp_path / "m", layers=8, vision=False, change=change), recipe())
    assert {p.where for p in problems} == {"config.json"}
    assert problems[0].what.startswith(what)
    assert all("num_hidden_layers" in p.what for p in problems[1:])  # the kinds of layers that it lists, too


def test_a_matrix_of_the_wrong_rank_is_refused(tmp_path: Path) -> None:
    at = "model.language_model.layers"

    def bend(config: dict[str, Any], tensors: RawTensors) -> None:
        tensors["lm_head.weight"] = ("BF16", (2, 256, 256), bytes(2**18))
        tensors["model.language_model.layers.0.mlp.experts.down_proj"] = ("BF16", (256, 512), bytes(2**18))
        tensors["model.language_model.layers.1.mlp.experts.gate_up_proj"] = (
            "BF16",
            (4, 255, 256),
            bytes(8 * 255 * 256),
        )
        tensors["model.language_model.layers.2.mlp.experts.down_proj"] = ("I32", (4, 256, 128), bytes(2**19))

    folder = build("qwen3_5_moe", tmp_path / "m", change=bend)
    problems = {p.where: p.what for p in refusals(folder, load_recipe("qwen-hybrid-w4a16-head"))}
    assert problems == {
        "lm_head.weight": "w4a16 g128 needs a matrix, this tensor is [2, 256, 256]",
        f"{at}.0.mlp.experts.down_proj": "a fused expert tensor has three dimensions, this one is [256, 512]",
        f"{at}.1.mlp.experts.gate_up_proj": "255 rows do not split into gate_proj and up_proj",
        f"{at}.2.mlp.experts.down_proj": "has dtype I32: only BF16 and F32 weights are quantized",
    }


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    folder = build("qwen3_5", tmp_path / "m", dtype="F16", change=lambda c, _: c.update(tie_word_embeddings=True))
    chosen = recipe(
        families="qwen3_next",
        schemes={"lm_head": "w4a16", "mlp.gate_up": {"scheme": "w4a16", "group_size": 128}, "mlp.down": "w4a16"},
        overrides=[{"layers": [8], "class": "mlp.down", "scheme": "fp8", "why": "there is no layer 8"}],
    )
    text = "\n".join(str(p) for p in refusals(folder, chosen, tp=[3]))
    for part in (
        "is for qwen3_next",
        "float16",
        "layer 8 hits nothing",
        "lm_head: is tied",
        "tensor parallel 3",
    ):
        assert part in text


# Notes and explanations.


def test_notes_say_what_a_recipe_does_not_reach(checkpoints: Checkpoints) -> None:
    plan = make_plan(Checkpoint.open(checkpoints("qwen3_5")), load_recipe("qwen-hybrid-w4a16"))
    assert plan.notes == ()  # lines for the other families of the recipe are no news
    sparse = make_plan(Checkpoint.open(checkpoints("qwen3_next")), load_recipe("qwen-hybrid-nvfp4-fp8"))
    assert "this checkpoint has no mlp.down, mlp.gate_up: those lines of the recipe do nothing here" in sparse.notes


def test_a_lost_draft_head_is_noted(tmp_path: Path) -> None:
    def lose(config: dict[str, Any], tensors: RawTensors) -> None:
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]

    plan = make_plan(Checkpoint.open(build("qwen3_5", tmp_path / "m", change=lose)), load_recipe("qwen-hybrid-fp8-mtp"))
    assert any(
        "declares a draft head (mtp_num_hidden_layers)" in note and "it was lost before" in note for note in plan.notes
    )
    assert any("this checkpoint has no mtp" in note for note in plan.notes)
    without = make_plan(Checkpoint.open(build("qwen3_5", tmp_path / "n", mtp=False)), load_recipe("qwen-hybrid-w4a16"))
    assert not any("draft head" in note for note in without.notes)


def test_explain_tells_the_whole_story(folder_27b: Path, plans_27b: Mapping[str, Plan]) -> None:
    plan = plans_27b["qwen-hybrid-nvfp4-fp8"]
    name = "model.language_model.layers.3.self_attn.k_proj.weight"
    text = plan.explain(name)
    assert text == plan.explain(name.removesuffix(".weight"))
    for part in (
        f"{name}  BF16 [1024, 5120]  in model-000",
        "layout   qwen3_5: matches",
        "class    attention.qkv (layer 3)",
        "group    model.language_model.layers.3.self_attn.qkv_proj: 3 tensors in one engine module",
        "layers.3.self_attn.q_proj.weight",
        "scheme   fp8: recipe: attention.qkv: fp8",
        "stores   model.language_model.layers.3.self_attn.k_proj.weight_scale  BF16 [1024, 1]",
        f"bytes    {2 * 1024 * 5120:,} -> {1024 * 5120 + 2048:,}",
    ):
        assert part in text
    gate = plan.explain("model.language_model.layers.0.linear_attn.in_proj_a")
    assert "scheme   keep: protected: recurrence control" in gate
    assert "group" not in gate
    assert "class    mtp (layer 0)" in plan.explain("mtp.layers.0.mlp.up_proj")


def test_explain_of_an_expert_counts_its_partners(checkpoints: Checkpoints) -> None:
    plan = make_plan(Checkpoint.open(checkpoints("qwen3_next")), load_recipe("qwen-hybrid-w4a16"))
    text = plan.explain("model.layers.0.mlp.experts.1.up_proj")
    assert "group    model.layers.0.mlp.experts: 12 tensors in one engine module" in text
    assert "and 6 more" in text


def test_explain_of_an_unknown_name_suggests_near_ones(plans_27b: Mapping[str, Plan]) -> None:
    with pytest.raises(UsageError) as caught:
        plans_27b["qwen-hybrid-w4a16"].explain("model.layers.3.self_attn.k_proj")
    assert "no tensor 'model.layers.3.self_attn.k_proj' in this checkpoint" in str(caught.value)
    assert "near: " in caught.value.hint
    assert "self_attn.k_proj" in caught.value.hint


def test_an_empty_checkpoint_is_refused(checkpoints: Checkpoints) -> None:
    from sparkquant.errors import CheckpointError

    empty = replace(Checkpoint.open(checkpoints("qwen3_5")), tensors={}, shards={})
    with pytest.raises(CheckpointError, match="holds no tensors"):
        make_plan(empty, recipe())


def test_headers_alone_are_enough(checkpoints: Checkpoints) -> None:
    opened = Checkpoint.open(checkpoints("qwen3_5_text"))
    moved: dict[str, TensorHeader] = {n: replace(t, shard="elsewhere.safetensors") for n, t in opened.tensors.items()}
    plan = make_plan(replace(opened, path=Path("nowhere"), tensors=moved), load_recipe("qwen-hybrid-w4a16"))
    assert plan.totals["tensors"] == len(moved)


@pytest.mark.parametrize("model", ["hybrid-5m", "hybrid-32m"])
def test_trained_models_plan_with_every_recipe(model: str, shared: Path) -> None:
    checkpoint = Checkpoint.open(shared / "models" / model)
    for name in hybrid_recipes():
        plan = make_plan(checkpoint, load_recipe(name))
        assert plan.totals["draft_head_tensors"] == 15
        assert plan.totals["output_bytes"] < plan.totals["source_bytes"]
