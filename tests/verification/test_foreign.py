"""Checkpoints written with the compressed-tensors package itself: read alike, dequantized alike, no false alarm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from torch import Tensor

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError
from sparkquant.formats import dequantize, stored_modules
from sparkquant.formats.compressed_tensors import declaration
from sparkquant.reading import DTYPE_NAMES
from sparkquant.verification.gate import verify
from tests.checkpoints import RawTensors, build, read_raw, write_json, write_shards
from tests.tensors import read_tensor
from tests.verification.conftest import findings

IGNORE = [
    "re:.*lm_head$", "re:.*linear_attn\\.in_proj_[ab]$", "re:.*visual\\..*", "re:.*mtp\\..*", "re:.*conv1d$",
]  # fmt: skip
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4a16": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None),
    "w4a16 asym": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        None,
    ),
    "w8a16 row": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, None),
    "nvfp4a16": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        None,
    ),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, TOKEN),
    "fp8 weights alone": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, None),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, STATIC),
    "fp8 block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        None,
    ),
}


def qparams(weight: Tensor, scheme: QuantizationScheme, peak: float) -> dict[str, Tensor]:
    """Scales by the largest value, as the package computes them."""
    args = scheme.weights
    assert args is not None
    rows, columns = weight.shape
    if args.strategy == "tensor":
        pieces = weight.reshape(1, -1)
    elif args.strategy == "block":
        blocks = weight.reshape(rows // 128, 128, columns // 128, 128).transpose(1, 2)
        pieces = blocks.reshape(rows // 128, columns // 128, -1)
    else:
        size = columns if args.strategy == "channel" else args.group_size
        assert size is not None
        pieces = weight.reshape(rows, columns // size, size)
    found: dict[str, Tensor] = {}
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = generate_gparam(torch.tensor(-peak), torch.tensor(peak))
    scale, zero = calculate_qparams(pieces.amin(-1), pieces.amax(-1), args, found.get("weight_global_scale"))
    # stored scales are BF16, and codes are made with what is stored
    found["weight_scale"] = scale if "weight_global_scale" in found else scale.to(torch.bfloat16)
    if not args.symmetric:
        found["weight_zero_point"] = zero
    return found


def raw(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data


def foreign(folder: Path, name: str) -> tuple[Path, Path, dict[str, Tensor]]:
    """Source, result, and the weights that the package itself reads back."""
    source = build("qwen3_5", folder / "source", layers=1)
    out = build("qwen3_5", folder / "out", layers=1)
    format, weights, activations = SCHEMES[name]
    fields = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": format}
    scheme = QuantizationScheme(**fields)
    compressor = BaseCompressor.get_value_from_registry(format)
    stored: RawTensors = {}
    expected: dict[str, Tensor] = {}
    checkpoint = Checkpoint.open(source)
    tensors = read_raw(source)
    peaks = {n: float(read_tensor(checkpoint, n).float().abs().max()) for n in tensors if "_proj.weight" in n}
    for tensor, value in tensors.items():
        module = tensor.removesuffix(".weight")
        if "_proj" not in module or "visual" in module or "mtp" in module or module.endswith(("proj_a", "proj_b")):
            stored[tensor] = value
            continue
        peak = max(p for n, p in peaks.items() if n.rpartition(".")[0].rpartition(".")[0] == module.rpartition(".")[0])
        weight = read_tensor(checkpoint, tensor).float()
        state = {"weight": weight, **qparams(weight, scheme, peak)}
        packed = compressor.compress(state, scheme)
        if activations is STATIC:
            packed["input_scale"] = torch.ones(1, dtype=torch.bfloat16)
        stored |= {f"{module}.{suffix}": raw(part) for suffix, part in packed.items()}
        expected[module] = compressor.decompress(packed, scheme)["weight"].float()
    (out / "model.safetensors.index.json").unlink()
    for shard in out.glob("*.safetensors"):
        shard.unlink()
    write_shards(out, stored)
    config = json.loads((out / "config.json").read_text())
    block = {"quant_method": "compressed-tensors", "format": format, "ignore": IGNORE}
    write_json(out / "config.json", {**config, "quantization_config": {**block, "config_groups": {"group_0": fields}}})
    return source, out, expected


@pytest.mark.parametrize("name", SCHEMES)
def test_the_package_is_read_as_it_reads_itself(name: str, tmp_path: Path) -> None:
    source, out, expected = foreign(tmp_path, name)
    report = verify(out, source=source, level="deep")
    assert findings(report) == set(), report.to_json()
    checkpoint = Checkpoint.open(out)
    modules = stored_modules(checkpoint)
    assert len(expected) == 6
    for module, weight in expected.items():
        mine = dequantize(checkpoint, modules[module])
        torch.testing.assert_close(mine, weight, rtol=2**-7, atol=1e-6)
        some = slice(len(weight) - 128, len(weight))
        assert torch.equal(dequantize(checkpoint, modules[module], first=some.start, last=some.stop), mine[some])
    plain = "model.language_model.embed_tokens"
    assert modules[plain].scheme is None
    assert torch.equal(dequantize(checkpoint, modules[plain]), read_tensor(checkpoint, f"{plain}.weight").float())


def test_static_activations_need_their_scale(tmp_path: Path) -> None:
    _, out, _ = foreign(tmp_path, "fp8 tensor")
    tensors = read_raw(out)
    lost = "model.language_model.layers.0.mlp.down_proj.input_scale"
    del tensors[lost]
    write_shards(out, tensors)
    report = verify(out)
    assert findings(report) == {"tensors.missing"}
    assert report.failed[0].tensors == (lost,)


def test_dequantizing_what_does_not_fit_is_a_clear_error(tmp_path: Path) -> None:
    _, out, _ = foreign(tmp_path, "w4a16")
    tensors = read_raw(out)
    name = "model.language_model.layers.0.mlp.up_proj"
    del tensors[f"{name}.weight_scale"]
    write_shards(out, tensors)
    checkpoint = Checkpoint.open(out)
    modules = stored_modules(checkpoint)
    with pytest.raises(CheckpointError, match="up_proj"):
        dequantize(checkpoint, modules[name])
    with pytest.raises(CheckpointError, match="rows 0:9999"):
        dequantize(checkpoint, modules["model.language_model.layers.0.mlp.down_proj"], last=9999)


@pytest.mark.parametrize(
    ("block", "where"),
    [
        ([], "quantization_config"),
        ({"config_groups": []}, "config_groups"),
        ({"config_groups": {"a": 1}, "format": "x"}, "config_groups.a"),
        ({"config_groups": {"a": {"targets": "Linear"}}, "format": "x"}, "config_groups.a.targets"),
        ({"config_groups": {"a": {"targets": [1], "weights": {}}}, "format": "x"}, "config_groups.a.targets"),
        ({"config_groups": {"a": {"targets": ["L"], "weights": []}}, "format": "x"}, "config_groups.a.weights"),
        ({"config_groups": {"a": {"weights": {"num_bits": "4"}}}}, "config_groups.a.weights.num_bits"),
        ({"config_groups": {"a": {}}, "ignore": {"a": 1}}, "ignore"),
    ],
)
def test_every_strange_type_has_a_place(block: Any, where: str) -> None:
    assert where in {fault.where for fault in declaration(block).faults}
