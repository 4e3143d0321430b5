"""Results as whole models: they load without a complaint and predict what the source predicts, nearly."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparkquant
from sparkquant.checkpoint import Checkpoint
from sparkquant.formats import dequantize, stored_modules
from sparkquant.layers import LayerClass
from sparkquant.layouts import layout_for
from sparkquant.live import live_view
from sparkquant.recipe_files import load_recipe
from tests.checkpoints import hybrid_recipes
from tests.execution.runs import Checkpoints, quantizes_a_tied_head, source_of
from tests.oracles.divergence import divergences, heldout_rows, log_probabilities, mean
from tests.oracles.loading import faults, load, weights_alone

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hybrid-5m"
DECODER = ("attention.qkv", "attention.out", "linear_attention.qkvz", "linear_attention.out", "mlp.gate_up", "mlp.down")


def _decoder_in(scheme: str) -> dict[str, Any]:
    """The classes of qwen-hybrid-w4a16 in another scheme."""
    return {
        "name": f"decoder-{scheme}",
        "summary": "every decoder Linear in one scheme",
        "families": ["qwen3_5"],
        "schemes": dict.fromkeys(DECODER, scheme),
    }


def _loads(kind: str, recipe: str) -> bool:
    """transformers 5.17 decompresses experts of packed integers and per-channel FP8, not NVFP4 or blocks."""
    experts = load_recipe(recipe).schemes.get(LayerClass.EXPERTS_DOWN)
    dense = kind not in ("next", "moe") or experts is None or experts.is_integer or experts.name == "fp8"
    return dense and not quantizes_a_tied_head(kind, recipe)


def _holds_what_is_stored(model: nn.Module, out: Path) -> int:
    """Every quantized module of the file has its dequantized weight in the model, experts included."""
    checkpoint = Checkpoint.open(out)
    layout = layout_for(checkpoint.config)
    state = model.state_dict()
    compared = 0
    for name, module in stored_modules(checkpoint).items():
        if module.scheme is not None and not name.startswith("mtp."):
            _, live = live_view(f"{name}.weight", state, layout)
            assert live is not None, name
            assert torch.equal(dequantize(checkpoint, module).to(live.dtype), live), name
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("vision", "qwen-hybrid-w4a16-fp8"),
        *(
            pytest.param(kind, recipe, marks=pytest.mark.slow)
            for kind in ("vision", "text", "next", "moe", "tied")
            for recipe in hybrid_recipes()
            if (kind, recipe) != ("vision", "qwen-hybrid-w4a16-fp8") and _loads(kind, recipe)
        ),
    ],
)
def test_transformers_loads_every_weight(kind: str, recipe: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    done = sparkquant.quantize(source_of(kind, checkpoints), recipe, tmp_path / "out", method="rtn")
    model, report = load(done.out)
    assert faults(report) == {}
    assert _holds_what_is_stored(model, done.out) > 11
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=torch.arange(40)[None]).logits).all()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", hybrid_recipes())
def test_the_example_keeps_within_its_recipes_limit(recipe: str, shared: Path, tmp_path: Path) -> None:
    rows = heldout_rows(shared / "eval" / "heldout-hybrid-5m.json", rows=8)
    done = sparkquant.quantize(EXAMPLE, recipe, tmp_path / "out", method="mse")
    model, report = load(done.out)
    assert faults(report) == {}
    limit = load_recipe(recipe).accept.kl_mean
    assert limit is not None
    source, _ = load(EXAMPLE)
    assert 0 < mean(divergences(log_probabilities(source, rows), log_probabilities(model, rows))) < limit


@pytest.fixture(scope="module")
def divergence_32m(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., float]:
    """Mean KL of the 32M model in a recipe, over the rows that every published number used."""
    folder = shared / "models" / "hybrid-32m"
    rows = heldout_rows(shared / "eval" / "heldout-hybrid-32m.json")
    source = list(log_probabilities(load(folder)[0], rows))

    def measure(recipe: Any, method: str) -> float:
        out = sparkquant.quantize(folder, recipe, tmp_path_factory.mktemp("kl") / "out", method=method).out
        model, report = load(out)
        assert faults(report) == {}
        return mean(divergences(source, log_probabilities(weights_alone(model), rows)))

    return measure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "method", "limit"),
    [
        pytest.param("qwen-hybrid-w4a16", "rtn", 1.03 * 0.01868, id="int4-rtn"),
        pytest.param("qwen-hybrid-w4a16", "mse", 0.0142, id="int4-mse"),
        pytest.param(_decoder_in("nvfp4a16"), "rtn", 1.03 * 0.01356, id="nvfp4-rtn"),
        pytest.param(_decoder_in("nvfp4a16"), "mse", 0.0105, id="nvfp4-mse"),
        pytest.param(_decoder_in("fp8"), "rtn", 1.03 * 0.00101, id="fp8-rtn"),
        pytest.param("qwen-hybrid-fp8", "rtn", 1.03 * 0.00101, id="fp8-block-rtn"),
        pytest.param("qwen-hybrid-fp8", "mse", 1.03 * 0.00101, id="fp8-block-mse"),
        pytest.param(_decoder_in("keep"), "rtn", 1e-7, id="nothing"),
    ],
)
def test_no_worse_than_the_published_peers(
    recipe: Any, method: str, limit: float, divergence_32m: Callable[..., float]
) -> None:
    found = divergence_32m(recipe, method)
    assert math.isfinite(found)
    assert found <= limit
