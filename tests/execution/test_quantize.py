"""quantize: the plan, executed. What it stores, what it leaves alone, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import sparkquant
from sparkquant import events
from sparkquant.checkpoint import INDEX, Checkpoint
from sparkquant.errors import CheckFailed, CheckpointError, NonFiniteWeight, PlanError, QuantizedSource, UsageError
from sparkquant.recipe_files import load_recipe
from sparkquant.report import Status
from tests.checkpoints import RawTensors, build, hybrid_recipes, read_raw
from tests.execution.folders import digests
from tests.execution.runs import BUILDS, Checkpoints, in_a_child, quantizes_a_tied_head, set_values, source_of

W4A16 = {
    "name": "small",
    "summary": "int4 MLP",
    "families": ["qwen3_5", "qwen3_5_moe", "qwen3_next"],
    "schemes": {"mlp.gate_up": "w4a16", "mlp.down": "w4a16"},
    "method": "rtn",
}


def _cases() -> list[Any]:
    return [pytest.param(kind, recipe, id=f"{kind}-{recipe}") for kind in BUILDS for recipe in hybrid_recipes()]


# Every recipe on every kind of checkpoint


@pytest.mark.parametrize(("kind", "recipe"), _cases())
def test_the_plan_is_what_is_stored(kind: str, recipe: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = source_of(kind, checkpoints)
    if quantizes_a_tied_head(kind, recipe):
        with pytest.raises(PlanError, match="lm_head: is tied to the embedding"):
            sparkquant.quantize(source, recipe, tmp_path / "out", method="mse")
        assert list(tmp_path.iterdir()) == []
        return
    done = sparkquant.quantize(source, recipe, tmp_path / "out", method="rtn")
    before, after = read_raw(source), read_raw(tmp_path / "out")
    planned = {t.name: (t.dtype, t.shape) for d in done.plan.decisions.values() for t in d.stored()}
    assert {name: (dtype, shape) for name, (dtype, shape, _) in after.items()} == planned
    assert done.plan.totals["output_bytes"] == sum(len(raw) for _, _, raw in after.values())
    assert done.plan.totals["output_tensors"] == len(after)
    kept = {d.tensor for d in done.plan.decisions.values() if d.scheme is None}
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    assert done.report.ok
    _nothing_protected_changed(before, after, fp8_draft=recipe.endswith("-mtp"))
    _config_is_the_sources(source, tmp_path / "out")
    _side_files_are_the_sources(source, tmp_path / "out")
    _index_is_right(tmp_path / "out", after)


def _nothing_protected_changed(before: RawTensors, after: RawTensors, *, fp8_draft: bool) -> None:
    """By name, not by the layout's word for it."""
    gates = (
        "in_proj_a.",
        "in_proj_b.",
        "in_proj_ba.",
        "A_log",
        "dt_bias",
        "conv1d.",
        "norm",
        "mlp.gate.",
        "embed_tokens",
    )
    for name, stored in before.items():
        if any(part in name for part in gates) or name.startswith("model.visual."):
            assert after[name] == stored, name
        if name.startswith("mtp.") and (not fp8_draft or "norm" in name or name.startswith("mtp.fc")):
            assert after[name] == stored, name


def _config_is_the_sources(source: Path, out: Path) -> None:
    before = json.loads((source / "config.json").read_text())
    after = json.loads((out / "config.json").read_text())
    assert list(after) == [*before, "quantization_config"]
    assert json.dumps({**after, "quantization_config": None}) == json.dumps({**before, "quantization_config": None})


def _side_files_are_the_sources(source: Path, out: Path) -> None:
    def beside(folder: Path) -> dict[str, str]:
        found = digests(folder)
        return {
            n: d for n, d in found.items() if not n.endswith((".safetensors", ".index.json")) and n != "config.json"
        }

    made = {"sparkquant/plan.json", "sparkquant/recipe.yaml", "SOURCE_README.md"}
    after = beside(out)
    assert (out / "SOURCE_README.md").read_bytes() == (source / "README.md").read_bytes()
    assert made <= set(after)
    assert {name: digest for name, digest in after.items() if name not in made} == beside(source)


def _index_is_right(out: Path, stored: RawTensors) -> None:
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    if len(shards) == 1:
        assert shards == ["model.safetensors"]
        assert not (out / INDEX).exists()
        return
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in stored.values())
    assert sorted(set(index["weight_map"].values())) == shards
    assert Checkpoint.open(out).inconsistencies == ()


@pytest.mark.parametrize("kind", BUILDS)
def test_the_record_repeats_the_job(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = source_of(kind, checkpoints)
    for method in (None, "rtn"):
        first = sparkquant.quantize(source, "qwen-hybrid-fp8", tmp_path / f"first {method}", method=method)
        recipe = first.out / "sparkquant" / "recipe.yaml"
        second = sparkquant.quantize(source, recipe, tmp_path / f"second {method}")
        assert (first.out / "sparkquant" / "plan.json").read_text() == first.plan.to_json() == second.plan.to_json()
        assert digests(first.out) == digests(second.out)
    written = (tmp_path / "first None" / "sparkquant" / "recipe.yaml").read_text()
    assert written == load_recipe("qwen-hybrid-fp8").text


def test_the_result_is_refused_as_a_source(checkpoints: Checkpoints, tmp_path: Path) -> None:
    sparkquant.quantize(source_of("text", checkpoints), W4A16, tmp_path / "out", method="mse")
    with pytest.raises(QuantizedSource, match="'compressed-tensors'"):
        sparkquant.quantize(tmp_path / "out", W4A16, tmp_path / "again", method="mse")
    assert not (tmp_path / "again").exists()


# Same input, same bytes

EVERY_SCHEME = ["qwen-hybrid-w4a16-fp8", "qwen-hybrid-nvfp4-fp8", "qwen-hybrid-fp8"]

_RUN = (
    "import sys, torch, sparkquant\n"
    "torch.set_num_threads(int(sys.argv[3]))\n"
    "for recipe in sys.argv[4:]:\n"
    "    for method in ('rtn', 'mse'):\n"
    "        sparkquant.quantize(sys.argv[1], recipe, f'{sys.argv[2]}/{recipe}-{method}', method=method)\n"
)


@pytest.mark.parametrize(
    ("model_type", "options", "recipes"),
    [
        ("qwen3_5_text", {"layers": 1, "mtp": False}, ["qwen-hybrid-w4a16-fp8"]),
        pytest.param("qwen3_5_text", {"layers": 1, "mtp": False}, EVERY_SCHEME, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", {"layers": 4, "experts": 2}, EVERY_SCHEME, marks=pytest.mark.slow),
    ],
)
def test_processes_threads_and_engines_agree_to_the_byte(
    model_type: str, options: dict[str, int], recipes: list[str], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoints(model_type, **options)
    runs = {
        "one": ("1", {"PYTHONHASHSEED": "1"}),
        "two": ("2", {"PYTHONHASHSEED": "2"}),
        "plain": ("1", {"SPARKQUANT_NUMBA": "0"}),
    }
    for name, (threads, environment) in runs.items():
        in_a_child(_RUN, source, tmp_path / name, threads, *recipes, **environment)
    first = digests(tmp_path / "one")
    assert len(first) > 2 * len(recipes) * 8
    assert digests(tmp_path / "two") == first
    assert digests(tmp_path / "plain") == first


def test_the_name_of_the_folders_leaves_no_trace(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = source_of("text", checkpoints)
    shutil.copytree(source, tmp_path / "other name")
    sparkquant.quantize(source, W4A16, tmp_path / "one", method="mse")
    sparkquant.quantize(tmp_path / "other name", W4A16, str(tmp_path / "deep" / "two"), method="mse")
    assert digests(tmp_path / "one") == digests(tmp_path / "deep" / "two")


# Shards


@pytest.mark.parametrize("shard_bytes", [1, 100_000, 1_000_000, 10**12])
@pytest.mark.parametrize("kind", ["moe", "next"])
def test_any_shard_size_holds_the_same_tensors(
    kind: str, shard_bytes: int, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    source = source_of(kind, checkpoints)
    whole = sparkquant.quantize(source, W4A16, tmp_path / "whole", method="mse")
    cut = sparkquant.quantize(source, W4A16, tmp_path / "cut", shard_bytes=shard_bytes, method="mse")
    assert read_raw(cut.out) == read_raw(whole.out)
    _index_is_right(cut.out, read_raw(cut.out))
    for shard in cut.plan.shards:
        stored = (cut.out / shard.name).stat().st_size
        assert shard.bytes < stored
        groups = {cut.plan.decisions[n].scale_group or n for n in shard.tensors}
        assert shard.bytes <= shard_bytes or len(groups) == 1


def test_fused_experts_in_slices_give_the_same_bytes(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of("moe", checkpoints)
    sparkquant.quantize(source, "qwen-hybrid-nvfp4-fp8", tmp_path / "whole", method="rtn")
    monkeypatch.setattr("sparkquant.filling.CHUNK_BYTES", 1)
    seen: list[events.Event] = []
    sparkquant.quantize(source, "qwen-hybrid-nvfp4-fp8", tmp_path / "sliced", method="rtn", listener=seen.append)
    assert digests(tmp_path / "whole") == digests(tmp_path / "sliced")
    slices = [event.what for event in seen if isinstance(event, events.Advanced) and event.what.endswith("[3:4]")]
    assert len(slices) == 2 * 4


def test_progress_adds_up_to_the_source(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for kind in BUILDS:
        seen: list[events.Event] = []
        done = sparkquant.quantize(
            source_of(kind, checkpoints), W4A16, tmp_path / kind, listener=seen.append, method="mse"
        )
        phases = [event for event in seen if isinstance(event, events.Started) and event.phase == "quantize"]
        assert [phase.total_bytes for phase in phases] == [done.plan.totals["source_bytes"]]
        advanced = [e for e in seen if isinstance(e, events.Advanced) and e.phase == "quantize"]
        assert sum(event.bytes for event in advanced) == done.plan.totals["source_bytes"]
        at = seen.index(events.Finished("quantize"))
        assert all(seen.index(event) < at for event in advanced)


# Refusals leave nothing


@pytest.mark.parametrize(
    ("value", "shown", "numba"),
    [
        (b"\xc0\x7f", "nan", "1"),
        (b"\x80\x7f", "inf", "1"),
        (b"\x80\xff", "-inf", "1"),
        (b"\xc0\xff", "nan", "0"),
        (b"\x80\xff", "-inf", "0"),
    ],
)
@pytest.mark.parametrize(
    ("model_type", "name", "index", "where"),
    [
        ("qwen3_5", "model.language_model.layers.0.mlp.down_proj.weight", 512 * 3 + 7, [3, 7]),
        ("qwen3_5_moe", "model.language_model.layers.1.mlp.experts.gate_up_proj", (256 * 2 + 5) * 256 + 9, [2, 5, 9]),
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    model_type: str, name: str, index: int, where: list[int], value: bytes, shown: str, numba: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def damage(_: Mapping[str, Any], tensors: RawTensors) -> None:
        set_values(tensors, name, index, value)

    monkeypatch.setenv("SPARKQUANT_NUMBA", numba)
    source = build(model_type, tmp_path / "in", layers=2, vision=False, change=damage)
    for recipe in ("qwen-hybrid-w4a16", "qwen-hybrid-nvfp4a16-mlp", "qwen-hybrid-fp8"):
        with pytest.raises(NonFiniteWeight) as caught:
            sparkquant.quantize(source, recipe, tmp_path / recipe, method="rtn")
        assert caught.value.what == f"{name}: element {where} is {shown}"
        assert caught.value.exit_code == 3
        assert not (tmp_path / recipe).exists()
        assert not (tmp_path / f"{recipe}.partial" / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "index", "where"),
    [
        ("model.language_model.layers.0.linear_attn.in_proj_a.weight", 256 + 3, [1, 3]),
        ("model.language_model.layers.0.linear_attn.A_log", 1, [1]),
        ("mtp.norm.weight", 200, [200]),
    ],
)
def test_a_kept_tensor_that_is_not_finite_is_named(name: str, index: int, where: list[int], tmp_path: Path) -> None:
    """One NaN in a gate is a NaN in every answer."""

    def damage(_: Mapping[str, Any], tensors: RawTensors) -> None:
        set_values(tensors, name, index, b"\xc0\x7f" if tensors[name][0] == "BF16" else b"\0\0\xc0\x7f")

    source = build("qwen3_5", tmp_path / "in", layers=2, vision=False, change=damage)
    with pytest.raises(NonFiniteWeight) as caught:
        sparkquant.quantize(source, "qwen-hybrid-w4a16", tmp_path / "out", method="rtn")
    assert caught.value.what == f"{name}: element {where} is nan"
    assert not (tmp_path / "out").exists()


def test_a_kept_tensor_of_a_live_model_is_looked_at(checkpoints: Checkpoints, tmp_path: Path) -> None:
    import transformers

    model: Any = transformers.Qwen3_5ForCausalLM.from_pretrained(source_of("text", checkpoints), dtype="auto")
    with torch.no_grad():
        model.model.layers[0].linear_attn.in_proj_a.weight[1, 3] = float("inf")
    with pytest.raises(NonFiniteWeight, match=r"in_proj_a.weight: element \[1, 3\] is inf"):
        sparkquant.quantize(model, "qwen-hybrid-w4a16", tmp_path / "out", method="rtn")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "model.safetensors"])
def test_a_source_that_changes_meanwhile_is_blamed(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(source_of("text", checkpoints), source)
    path = source / name if (source / name).exists() else next(iter(sorted(source.glob("*.safetensors"))))

    def disturb(event: events.Event) -> None:
        if isinstance(event, events.Finished) and event.phase == "quantize":
            path.write_bytes(path.read_bytes()[:-8] + b"        ")

    with pytest.raises(CheckpointError, match=f"changed while it was read: {path.name}"):
        sparkquant.quantize(source, W4A16, tmp_path / "out", method="rtn", listener=disturb)
    assert not (tmp_path / "out").exists()


def test_faults_come_before_any_work(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = source_of("text", checkpoints)
    for out in (None, "", " "):
        with pytest.raises(UsageError, match="no output folder"):
            sparkquant.quantize(source, W4A16, out, method="mse")
    with pytest.raises(UsageError):
        sparkquant.quantize(source, W4A16, tmp_path / "out", shard_bytes=0, method="mse")
    with pytest.raises(UsageError):
        sparkquant.quantize(source, W4A16, tmp_path / "out", tp=(3,), method="mse")
    with pytest.raises(UsageError):
        sparkquant.quantize(source, {**W4A16, "families": ["qwen3_next"]}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_output_may_not_lie_inside_the_source(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """It would be a side file of its own source."""
    shutil.copytree(source_of("text", checkpoints), tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    before = digests(tmp_path)
    for out in (tmp_path / "model" / "out", tmp_path / "link" / "deep" / "out"):
        with pytest.raises(UsageError, match="out lies inside the source"):
            sparkquant.quantize(tmp_path / "model", W4A16, out, method="mse")
    with pytest.raises(UsageError, match="model exists already"):
        sparkquant.quantize(tmp_path / "model", W4A16, tmp_path / "model", method="mse")
    assert digests(tmp_path) == before


def test_a_relative_output_is_taken_from_here(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = sparkquant.quantize(source_of("text", checkpoints), W4A16, "a/b", method="mse")
    assert done.out == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b" / "config.json").exists()


@pytest.mark.parametrize("target", ["outside", "nowhere", "pipe"])
def test_a_side_file_that_cannot_come_along_is_refused_before_the_work(
    target: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(source_of("text", checkpoints), tmp_path / "model")
    (tmp_path / "secret.txt").write_text("secret")
    side = tmp_path / "model" / "notes.txt"
    if target == "pipe":
        os.mkfifo(side)
    else:
        side.symlink_to(tmp_path / "secret.txt" if target == "outside" else "missing.txt")
    message = "is a link that leaves the checkpoint" if target == "outside" else "is no file that can be copied"
    with pytest.raises(CheckpointError, match=rf"notes\.txt {message}"):
        sparkquant.quantize(tmp_path / "model", W4A16, tmp_path / "out", method="mse")
    assert not (tmp_path / "out.partial").exists()


def test_side_files_come_along_from_subfolders_and_through_links(checkpoints: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(source_of("text", checkpoints), tmp_path / "model")
    (tmp_path / "model" / "extra").mkdir()
    (tmp_path / "model" / "extra" / "vocab.txt").write_text("a\n")
    (tmp_path / "model" / "linked.txt").symlink_to("extra/vocab.txt")
    (tmp_path / "model" / "sparkquant").mkdir()
    (tmp_path / "model" / "sparkquant" / "plan.json").write_text("{}")
    (tmp_path / "model" / "out.partial.journal").write_text("of another job")
    (tmp_path / "model" / "journal.jsonl").write_text("{}")
    (tmp_path / "model" / ".cache").write_text("hidden")
    done = sparkquant.quantize(tmp_path / "model", W4A16, tmp_path / "out", method="mse")
    assert (done.out / "linked.txt").read_text() == (done.out / "extra" / "vocab.txt").read_text() == "a\n"
    assert not (done.out / "linked.txt").is_symlink()
    assert (done.out / "sparkquant" / "plan.json").read_text() == done.plan.to_json()
    assert (done.out / "journal.jsonl").read_text() == "{}"
    assert not (done.out / ".cache").exists()


def test_a_shard_that_shrinks_meanwhile_is_an_error_not_a_crash(checkpoints: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(source_of("vision", checkpoints), tmp_path / "model")
    shard = max((tmp_path / "model").glob("*.safetensors"))

    def shrink(event: events.Event) -> None:
        if isinstance(event, events.Started):
            os.truncate(shard, shard.stat().st_size // 2)

    with pytest.raises(CheckpointError, match=rf"{shard.name}: ends inside "):
        sparkquant.quantize(tmp_path / "model", W4A16, tmp_path / "out", listener=shrink, method="mse")
    assert not (tmp_path / "out").exists()


def test_a_red_check_publishes_nothing(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    red = sparkquant.Check("values.scale", Status.FAIL, "scale is zero", ("a.weight_scale",))
    monkeypatch.setattr("sparkquant.execute.verify", lambda *_, **__: sparkquant.Report("x", (red,)))
    with pytest.raises(CheckFailed, match=r"values\.scale: scale is zero"):
        sparkquant.quantize(source_of("text", checkpoints), W4A16, tmp_path / "out", method="mse")
    assert not (tmp_path / "out").exists()
