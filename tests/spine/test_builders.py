"""The test checkpoints are what they claim: published names and sizes, loadable, deterministic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import CONFIGS, build, config_of, read_raw, shapes_of
from tests.data import published
from tests.data.shapes import parameters, tensor_shapes

VARIANTS = [*((m, {}) for m in CONFIGS), ("qwen3_5", {"tied": True}), ("qwen3_5", {"float32_state": True})]


def test_formulas_give_the_published_27b() -> None:
    shapes = published.qwen3_5_27b_shapes()
    assert len(shapes) == published.QWEN3_5_27B_TENSORS == 1199
    assert parameters(shapes) == published.QWEN3_5_27B_PARAMETERS == 27_781_427_952
    assert 2 * parameters(shapes) == published.QWEN3_5_27B_BYTES
    count = {
        part: sum(name.startswith(part) for name in shapes)
        for part in ("mtp.", "model.visual.merger.", "model.visual.", "model.language_model.layers.")
    }
    assert count == {"mtp.": 15, "model.visual.merger.": 6, "model.visual.": 333, "model.language_model.layers.": 848}
    gates = sum(
        size[0] * size[1] for name, size in shapes.items() if name.endswith(("in_proj_a.weight", "in_proj_b.weight"))
    )
    assert gates == 23_592_960


def test_formulas_give_the_published_35b_a3b() -> None:
    shapes = tensor_shapes(published.QWEN3_5_35B_A3B)
    draft_head = {name: shape for name, shape in shapes.items() if name.startswith("mtp.")}
    assert parameters(shapes) == 35_951_822_704
    assert (len(draft_head), parameters(draft_head)) == (19, 844_640_768)


def test_formulas_give_qwen3_next_80b_a3b_without_its_draft_head() -> None:
    bare = tensor_shapes(published.QWEN3_NEXT_80B_A3B)
    whole = tensor_shapes({**published.QWEN3_NEXT_80B_A3B, "mtp_num_hidden_layers": 1})
    assert parameters(bare) == 79_674_391_296
    assert len(whole) - len(bare) == 17 + 3 * 512


@pytest.mark.parametrize(("model_type", "options"), VARIANTS, ids=str)
def test_files_hold_exactly_the_shapes_of_their_config(
    model_type: str, options: dict[str, bool], checkpoints: Callable[..., Path]
) -> None:
    folder = checkpoints(model_type, **options)
    stored = read_raw(folder)
    config = config_of(model_type, tied=options.get("tied", False))
    assert json.loads((folder / "config.json").read_text()) == config
    assert {name: shape for name, (_, shape, _) in stored.items()} == shapes_of(config)
    wide = {name for name, (dtype, _, _) in stored.items() if dtype != "BF16"}
    assert len(wide) == (6 if options.get("float32_state") else 0)
    assert sum(name.startswith("mtp.") for name in stored) == {
        "qwen3_next": 29,
        "qwen3_5_moe": 19,
        "qwen3_5_moe_text": 19,
    }.get(model_type, 15)


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    one, two = build("qwen3_5_moe", tmp_path / "one", shards=3), build("qwen3_5_moe", tmp_path / "two", shards=3)
    files = sorted(path.name for path in one.iterdir())
    assert files == sorted(path.name for path in two.iterdir())
    assert [(one / name).read_bytes() for name in files] == [(two / name).read_bytes() for name in files]
    other = build("qwen3_5_moe", tmp_path / "other", shards=1, seed=1)
    assert read_raw(other).keys() == read_raw(one).keys()
    assert read_raw(other)["lm_head.weight"] != read_raw(one)["lm_head.weight"]


def test_sharding_does_not_change_tensors(tmp_path: Path) -> None:
    whole = read_raw(build("qwen3_next", tmp_path / "one", shards=1))
    assert read_raw(build("qwen3_next", tmp_path / "many", shards=5)) == whole
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 5
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "options"), VARIANTS, ids=str)
def test_transformers_loads_and_runs_each(
    model_type: str, options: dict[str, bool], checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = checkpoints(model_type, **options)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, architecture).from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert {name for name in info["missing_keys"] if not (options.get("tied") and name == "lm_head.weight")} == set()
    assert all(name.startswith("mtp.") for name in info["unexpected_keys"])
    assert not info["mismatched_keys"]
    stored = read_raw(folder)
    for name, value in model.state_dict().items():
        if name in stored and stored[name][0] == "BF16":
            assert value.contiguous().view(torch.uint8).numpy().tobytes() == stored[name][2], name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi é"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == text
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=ids).logits).all()
