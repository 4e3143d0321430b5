"""compressed-tensors' own compressors read every recipe's result as this project's dequantizers do, to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sparkquant
from sparkquant.checkpoint import Checkpoint
from sparkquant.formats import dequantize, stored_modules
from sparkquant.formats.stored import StoredModule
from tests.checkpoints import RawTensors, hybrid_recipes
from tests.execution.runs import Checkpoints
from tests.tensors import read_tensor

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme


def _small(checkpoints: Checkpoints) -> Path:
    """One layer of delta net and one of attention."""
    return checkpoints("qwen3_5_text", layers=4, change=_two_layers)


def _two_layers(config: dict[str, Any], tensors: RawTensors) -> None:
    config |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    for name in list(tensors):
        if ".layers.1." in name or ".layers.2." in name:
            del tensors[name]
        elif name.startswith("model.layers.3."):
            tensors[name.replace("layers.3", "layers.1")] = tensors.pop(name)


def _theirs(checkpoint: Checkpoint, module: StoredModule, scheme: QuantizationScheme) -> Tensor:
    stored = {suffix: read_tensor(checkpoint, header.name) for suffix, header in module.tensors.items()}
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format)
    weight: Tensor = compressor.decompress(stored, scheme)["weight"]
    return weight


def _group_of(config: QuantizationConfig, name: str) -> QuantizationScheme:
    """The one group whose targets match."""
    found = [
        scheme
        for scheme in config.config_groups.values()
        if any(re.match(target.removeprefix("re:"), name) for target in scheme.targets)
    ]
    assert len(found) == 1, name
    group: QuantizationScheme = found[0]
    return group


def _agree(out: Path) -> int:
    """Compare every module of the result, and return how many there are."""
    checkpoint = Checkpoint.open(out)
    config = QuantizationConfig.model_validate(json.loads((out / "config.json").read_text())["quantization_config"])
    compared = 0
    for name, module in stored_modules(checkpoint).items():
        if module.scheme is not None:
            theirs = _theirs(checkpoint, module, _group_of(config, name))
            ours = dequantize(checkpoint, module)
            assert ours.dtype is torch.float32
            assert torch.equal(ours.to(theirs.dtype), theirs), name
            compared += 1
    return compared


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("recipe", hybrid_recipes())
@pytest.mark.parametrize(
    "model_type",
    [
        "small",
        pytest.param("qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", marks=pytest.mark.slow),
        pytest.param("qwen3_next", marks=pytest.mark.slow),
    ],
)
def test_results_decompress_to_what_our_dequantizers_give(
    model_type: str, recipe: str, method: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    source = _small(checkpoints) if model_type == "small" else checkpoints(model_type, experts=2, vision=False)
    done = sparkquant.quantize(source, recipe, tmp_path / "out", method=method)
    modules = done.plan.totals["modules"]
    assert _agree(done.out) == sum(count for label, count in modules.items() if label != "keep") > 5


@pytest.mark.parametrize(
    "scheme",
    [
        {"scheme": "w4a16", "group_size": 32},
        {"scheme": "w4a16", "group_size": -1},
        {"scheme": "w4a16", "group_size": 64, "symmetric": False},
        {"scheme": "w4a16", "group_size": -1, "symmetric": False},
        {"scheme": "w8a16", "group_size": -1},
        {"scheme": "w8a16", "group_size": 64},
    ],
    ids=lambda scheme: "-".join(map(str, scheme.values())),
)
def test_options_of_integer_schemes_decompress_alike(
    scheme: dict[str, Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    recipe = {
        "name": "odd",
        "summary": "every option",
        "families": ["qwen3_5"],
        "schemes": {"mlp.gate_up": scheme, "mlp.down": scheme, "attention.qkv": scheme},
    }
    for method in ("rtn", "mse"):
        done = sparkquant.quantize(_small(checkpoints), recipe, tmp_path / method, method=method)
        assert _agree(done.out) == 2 * 3 + 3
