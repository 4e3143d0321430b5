"""Without a source: nothing is missed in whole checkpoints of any family, and what is gone is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkquant.report import Check
from sparkquant.verification.gate import verify
from tests.checkpoints import read_raw, write_shards
from tests.families.builders import build
from tests.families.configs import CASES
from tests.verification.conftest import Draft, findings

COMPLETE = {"tensors.layers", "tensors.required", "mtp.missing", "vision.missing", "head.missing"}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in built:
            built[case] = build(case, tmp_path_factory.mktemp("family"))
        return built[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_a_whole_checkpoint_misses_nothing(case: str, family: Callable[[str], Path]) -> None:
    report = verify(family(case), level="headers")
    assert findings(report) & COMPLETE == set()


LOST = [
    ("deepseek_v3", "model.layers.2.eh_proj.", "mtp.missing"),
    ("deepseek_v3", "model.layers.2.self_attn.o_proj.", "mtp.missing"),
    ("deepseek_v3", "model.layers.2.mlp.experts.", "mtp.missing"),
    ("qwen4_exp", "mtp.fc_hidden.", "mtp.missing"),
    ("olmo_hybrid", "model.layers.1.linear_attn.A_log", "tensors.layers"),
    ("qwen4_exp", "model.language_model.layers.1.linear_attn.A_log", "tensors.layers"),
    ("mistral4", "language_model.lm_head.", "head.missing"),
    ("nemotron_h", "backbone.embeddings.", "tensors.required"),
    ("lfm2", "model.embedding_norm.", "tensors.required"),
    ("glm5_next", "model.visual.merger.", "vision.missing"),
]


@pytest.mark.parametrize(("case", "name", "id"), LOST, ids=[f"{case} {name}" for case, name, _ in LOST])
def test_what_is_gone_is_found(case: str, name: str, id: str, family: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(family(case), tmp_path / "copy")
    tensors = read_raw(tmp_path / "copy")
    gone = [each for each in tensors if each.startswith(name)]
    assert gone
    for shard in [*(tmp_path / "copy").glob("*.safetensors"), *(tmp_path / "copy").glob("*.index.json")]:
        shard.unlink()
    write_shards(tmp_path / "copy", {each: raw for each, raw in tensors.items() if each not in gone})
    report = verify(tmp_path / "copy", level="headers")
    assert findings(report) & COMPLETE == {id}


@pytest.mark.parametrize("part", ["patch_embed.proj", "pos_embed", "merger.norm", "merger.linear_fc1"])
def test_a_tower_without_a_part_is_found(part: str, draft: Callable[..., Draft]) -> None:
    found = _without(draft(), f"model.visual.{part}.")["vision.missing"]
    assert found.status == "fail"
    assert f"model.visual.{part}" in found.tensors


@pytest.mark.parametrize("name", ["model.language_model.embed_tokens.weight", "model.language_model.norm.weight"])
def test_embedding_and_final_norm_are_named(name: str, draft: Callable[..., Draft]) -> None:
    found = _without(draft(), name)["tensors.required"]
    assert (found.status, found.tensors) == ("fail", (name,))


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("intermediate_size", 640, "mlp.gate_proj"),
        ("num_key_value_heads", 2, "self_attn.k_proj"),
        ("vocab_size", 1024, "embed_tokens"),
        ("linear_value_head_dim", 64, "linear_attn.out_proj"),
        ("hidden_size", 512, "embed_tokens"),
    ],
)
@pytest.mark.parametrize("recipe", ["qwen-hybrid-w4a16", "qwen-hybrid-nvfp4-fp8"])
def test_widths_of_the_config_are_those_of_quantized_weights(
    recipe: str, field: str, value: int, place: str, draft: Callable[..., Draft]
) -> None:
    copy = draft(recipe)
    copy.config["text_config"][field] = value
    copy.save()
    found = {check.id: check for check in verify(copy.path, level="headers").checks}["config.sizes"]
    assert found.status == "fail"
    assert any(name.endswith(place) for name in found.tensors)
    assert f"{field} {value}" in found.message


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("layers.1.mlp.", "model.language_model.layers.1"),
        ("layers.2.linear_attn.", "model.language_model.layers.2"),
        ("layers.3.self_attn.", "model.language_model.layers.3"),
    ],
)
def test_a_whole_part_that_a_layer_lacks_is_found(part: str, names: str, draft: Callable[..., Draft]) -> None:
    found = _without(draft(), f"model.language_model.{part}")["tensors.layers"]
    assert found.status == "fail"
    assert names in found.tensors


def test_a_bias_is_as_long_as_the_rows(draft: Callable[..., Draft]) -> None:
    copy = draft()
    copy.forget_plan()
    name = "model.language_model.layers.3.self_attn.q_proj.bias"
    copy.tensors[name] = ("BF16", (3,), bytes(6))
    copy.save()
    found = {check.id: check for check in verify(copy.path, level="headers").checks}["tensors.shape"]
    assert (found.status, found.tensors) == ("fail", (name,))


def _without(draft: Draft, prefix: str) -> dict[str, Check]:
    draft.forget_plan()
    draft.tensors = {name: raw for name, raw in draft.tensors.items() if not name.startswith(prefix)}
    draft.save()
    return {check.id: check for check in verify(draft.path, level="headers").checks}
