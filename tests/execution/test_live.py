"""A live model is a set of changes to the folder that it was loaded from, never a checkpoint of its own."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparkquant
from sparkquant import events
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import UsageError
from sparkquant.live import overlay_of
from tests.checkpoints import read_raw
from tests.execution.folders import digests
from tests.execution.runs import Checkpoints, in_a_child, source_of

transformers = pytest.importorskip("transformers")

Q_PROJ = "model.language_model.layers.3.self_attn.q_proj.weight"
NORM = "model.language_model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def load(checkpoints: Checkpoints) -> Callable[..., nn.Module]:
    """`load("vision", "AutoModelForCausalLM", dtype=...)`: a fresh live model, read from the disk once per class."""
    loaded: dict[str, nn.Module] = {}

    def get(kind: str, model_class: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        key = f"{kind} {model_class} {dtype}"
        if key not in loaded:
            folder = source_of(kind, checkpoints)
            transformers.utils.logging.disable_progress_bar()
            loaded[key] = getattr(transformers, model_class).from_pretrained(folder, dtype=dtype)
        return copy.deepcopy(loaded[key])

    return get


CLASSES = {
    "vision": "Qwen3_5ForConditionalGeneration",
    "text": "Qwen3_5ForCausalLM",
    "next": "Qwen3NextForCausalLM",
    "moe": "Qwen3_5MoeForConditionalGeneration",
    "tied": "Qwen3_5ForConditionalGeneration",
}


def _change(model: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change a live weight in place and return it."""
    weight = model.state_dict()[name]
    with torch.no_grad():
        weight.copy_(change(weight))
    return weight


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# Unchanged


@pytest.mark.parametrize("kind", CLASSES)
def test_an_unchanged_model_gives_what_its_folder_gives(
    kind: str, load: Callable[..., nn.Module], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    source = source_of(kind, checkpoints)
    by_folder = sparkquant.quantize(source, "qwen-hybrid-w4a16", tmp_path / "folder", method="rtn")
    by_model = sparkquant.quantize(load(kind, CLASSES[kind]), "qwen-hybrid-w4a16", tmp_path / "model", method="rtn")
    assert by_model.plan.to_json() == by_folder.plan.to_json()
    assert digests(by_model.out) == digests(by_folder.out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["vision", "next", "moe"])
def test_another_precision_is_no_change(
    kind: str, dtype: torch.dtype, load: Callable[..., nn.Module], checkpoints: Checkpoints
) -> None:
    """The vision checkpoint stores A_log and the gated norm in float32, which a bfloat16 model has rounded."""
    model = load(kind, CLASSES[kind], dtype)
    if dtype is torch.float16:
        model = load(kind, CLASSES[kind], torch.float32).to(torch.float16)
    assert overlay_of(model, Checkpoint.open(source_of(kind, checkpoints))) == {}


def test_the_text_only_class_of_a_vision_checkpoint_works(
    load: Callable[..., nn.Module], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    source = source_of("vision", checkpoints)
    model = load("vision", "AutoModelForCausalLM")
    assert not any("visual" in name for name in model.state_dict())
    by_folder = sparkquant.quantize(source, "qwen-hybrid-w4a16", tmp_path / "folder", method="rtn")
    by_model = sparkquant.quantize(model, "qwen-hybrid-w4a16", tmp_path / "model", method="rtn")
    assert digests(by_model.out) == digests(by_folder.out)
    name = next(name for name in model.state_dict() if name.endswith("layers.3.self_attn.q_proj.weight"))
    assert "language_model" not in name
    _change(model, name, lambda weight: weight * 1.5)
    assert list(overlay_of(model, Checkpoint.open(source))) == [Q_PROJ]


# Changed


def test_a_changed_linear_is_quantized_and_all_else_comes_from_the_files(
    load: Callable[..., nn.Module], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    source = source_of("vision", checkpoints)
    model = load("vision", CLASSES["vision"])
    before = sparkquant.quantize(source, "qwen-hybrid-w4a16", tmp_path / "before", method="rtn")
    _change(model, Q_PROJ, lambda weight: weight * 2)
    after = sparkquant.quantize(model, "qwen-hybrid-w4a16", tmp_path / "after", method="rtn")
    assert after.plan.source["overlaid"] == [Q_PROJ]
    old, new = read_raw(before.out), read_raw(after.out)
    changed = {name for name in old if old[name] != new[name]}
    # Twice the weight is the same codes with twice the scale.
    assert changed == {Q_PROJ + "_scale"}
    scales = [torch.frombuffer(bytearray(raw[Q_PROJ + "_scale"][2]), dtype=torch.bfloat16) for raw in (old, new)]
    assert torch.equal(scales[0] * 2, scales[1])
    assert all(
        new[name] == stored for name, stored in read_raw(source).items() if name.startswith(("mtp.", "model.visual."))
    )


def test_a_changed_model_is_another_job(
    load: Callable[..., nn.Module], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    def interrupt(event: object) -> None:
        if isinstance(event, events.Advanced):
            raise KeyboardInterrupt

    model = load("text", CLASSES["text"])
    name = Q_PROJ.replace("language_model.", "")
    _change(model, name, lambda weight: weight * 2)
    with pytest.raises(KeyboardInterrupt):
        sparkquant.quantize(model, out=tmp_path / "out", method="rtn", shard_bytes=1, listener=interrupt)
    _change(model, name, lambda weight: weight * 2)
    with pytest.raises(UsageError, match=r"belongs to another job\n  overlay: was [0-9a-f]{32}, is [0-9a-f]{32}\n"):
        sparkquant.quantize(model, out=tmp_path / "out", method="rtn", shard_bytes=1)
    with pytest.raises(UsageError, match=r"plan: was"):
        sparkquant.quantize(source_of("text", checkpoints), out=tmp_path / "out", method="rtn", shard_bytes=1)


@pytest.mark.parametrize("kind", ["next", "moe"])
def test_a_changed_expert_is_found(kind: str, load: Callable[..., nn.Module], checkpoints: Checkpoints) -> None:
    """transformers stacks the experts of a layer; Qwen3-Next files hold one matrix per expert and part."""
    source = Checkpoint.open(source_of(kind, checkpoints))
    model = load(kind, CLASSES[kind])
    state = model.state_dict()
    stacked = next(name for name in state if name.endswith("layers.1.mlp.experts.gate_up_proj"))
    experts, rows, _ = state[stacked].shape
    with torch.no_grad():
        state[stacked][2, rows // 2 + 3] *= 1.5
        state[stacked.replace("gate_up", "down")][experts - 1] *= 1.5
    overlay = overlay_of(model, source)
    if kind == "moe":
        assert sorted(overlay) == [stacked.replace("gate_up", "down"), stacked]
        assert torch.equal(overlay[stacked], state[stacked])
        return
    parent = stacked.removesuffix(".gate_up_proj")
    assert sorted(overlay) == [f"{parent}.2.up_proj.weight", f"{parent}.{experts - 1}.down_proj.weight"]
    assert torch.equal(overlay[f"{parent}.2.up_proj.weight"], state[stacked][2, rows // 2 :])


def test_a_change_is_stored_in_the_dtype_of_the_checkpoint(
    load: Callable[..., nn.Module], checkpoints: Checkpoints
) -> None:
    source = Checkpoint.open(source_of("vision", checkpoints))
    model = load("vision", CLASSES["vision"], torch.float32)
    weight = _change(model, Q_PROJ, lambda value: value * 1.7)
    state = "model.language_model.layers.0.linear_attn.A_log"
    log = _change(model, state, lambda value: value + 0.125)
    _change(model, NORM, lambda value: value + 1e-9)
    overlay = overlay_of(model, source)
    assert {name: value.dtype for name, value in overlay.items()} == {Q_PROJ: torch.bfloat16, state: torch.float32}
    assert torch.equal(overlay[Q_PROJ], weight.to(torch.bfloat16))
    assert torch.equal(overlay[state], log)


def test_a_changed_norm_is_kept_as_it_is_now(load: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = load("vision", CLASSES["vision"])
    norm = _change(model, NORM, lambda weight: weight + 0.5)
    done = sparkquant.quantize(model, "qwen-hybrid-w4a16", tmp_path / "out", method="rtn")
    assert read_raw(done.out)[NORM] == ("BF16", tuple(norm.shape), _raw(norm))
    kept = next(check for check in done.report.checks if check.id == "source.bytes")
    assert kept.message.endswith("; 1 tensors come from a live model and were not compared")


def test_changed_weights_are_not_compared_with_the_files(
    load: Callable[..., nn.Module], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    model = load("vision", CLASSES["vision"])
    _change(model, Q_PROJ, lambda weight: weight * 2)
    done = sparkquant.quantize(model, "qwen-hybrid-w4a16", tmp_path / "out", method="rtn")
    report = sparkquant.verify(done.out, source=source_of("vision", checkpoints), level="deep")
    assert report.ok
    error = next(check for check in report.checks if check.id == "values.error")
    assert error.message.endswith("; 1 tensors come from a live model and were not compared")


# Refused


def test_a_model_without_a_folder_says_what_is_missing(
    load: Callable[..., nn.Module], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.from_pretrained(source_of("text", checkpoints))
    config._name_or_path = ""
    model = transformers.Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    for call in (sparkquant.plan, lambda m: sparkquant.quantize(m, out=tmp_path / "out", method="mse")):
        with pytest.raises(UsageError) as caught:
            call(model)
        assert str(caught.value) == (
            "the source folder of this live model is not known (config._name_or_path is empty); it is needed because"
            " transformers never loads the draft head (mtp.*)\n"
            "hint: pass source=FOLDER: the checkpoint folder or hub id that the model was loaded from"
        )
    model.load_state_dict(load("text", CLASSES["text"]).state_dict())
    source = source_of("text", checkpoints)
    assert sparkquant.plan(model, source=source).to_json() == sparkquant.plan(source).to_json()
    by_model = sparkquant.quantize(model, out=tmp_path / "model", source=source, method="rtn")
    by_folder = sparkquant.quantize(source, out=tmp_path / "folder", method="rtn")
    assert digests(by_model.out) == digests(by_folder.out)


def test_a_folder_that_is_gone_is_named(load: Callable[..., nn.Module], tmp_path: Path) -> None:
    model: Any = load("text", CLASSES["text"])
    model.config._name_or_path = str(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"config\._name_or_path is '.*gone', which is no folder"):
        sparkquant.plan(model)


def _adapter(model: nn.Module) -> str:
    model.get_submodule("model.layers.3.self_attn.q_proj").register_parameter("lora_A", nn.Parameter(torch.zeros(2, 2)))
    return "model.layers.3.self_attn.q_proj.lora_A: is no tensor of the checkpoint: its change would be lost"


def _meta(model: nn.Module) -> str:
    model.get_submodule("model.layers.3.self_attn.q_proj").to("meta")
    return "model.layers.3.self_attn.q_proj.weight: has no data (meta device): load the model without offloading"


def _wider(model: nn.Module) -> str:
    model.get_submodule("model.layers.3.self_attn").register_module("q_proj", nn.Linear(256, 640, bias=False))
    return (
        "model.layers.3.self_attn.q_proj.weight: is [640, 256], the checkpoint's model.layers.3.self_attn.q_proj.weight"
    )


def _shorter(model: Any) -> str:
    del model.model.layers[3]
    return "model.layers.3.self_attn.q_proj.weight: is in the checkpoint but not in the live model"


def _headless(model: Any) -> str:
    del model.lm_head
    return "lm_head.weight: is in the checkpoint but not in the live model"


@pytest.mark.parametrize("damage", [_adapter, _meta, _wider, _shorter, _headless])
def test_a_model_that_does_not_fit_its_folder_is_refused(
    damage: Callable[[Any], str], load: Callable[..., nn.Module], tmp_path: Path
) -> None:
    model = load("text", CLASSES["text"])
    expected = damage(model)
    for call in (sparkquant.plan, lambda m: sparkquant.quantize(m, out=tmp_path / "out", method="mse")):
        with pytest.raises(UsageError) as caught:
            call(model)
        assert expected in str(caught.value)
        assert "source=" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", [None, 7, b"folder", ["folder"], {}])
def test_what_is_no_model_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"a folder, a hub id or a torch module, not {type(model).__name__}"):
        sparkquant.quantize(model, out=tmp_path / "out", method="mse")


# The public names


def test_no_module_carries_a_public_functions_name() -> None:
    """`import sparkquant.plan` would put the module where the function was."""
    modules = {info.name for info in pkgutil.iter_modules(sparkquant.__path__)}
    assert modules & {*sparkquant.__all__, "evaluate", "validate", "publish"} == set()


def test_public_functions_stay_functions(checkpoints: Checkpoints, tmp_path: Path) -> None:
    code = (
        "import importlib, pkgutil, sys, sparkquant\n"
        "for round in range(2):\n"
        "    for info in pkgutil.walk_packages(sparkquant.__path__, 'sparkquant.'):\n"
        "        if not info.name.endswith('__main__'):\n            importlib.import_module(info.name)\n"
        "    for name in sparkquant.__all__:\n"
        "        assert callable(getattr(sparkquant, name)), name\n"
        "    for _ in range(2):\n"
        "        sparkquant.plan(sys.argv[1])\n"
        "        sparkquant.quantize(sys.argv[1], out=f'{sys.argv[2]}/{round}-{_}', method='rtn')\n"
    )
    in_a_child(code, checkpoints("qwen3_5_text", layers=1, mtp=False), tmp_path)
