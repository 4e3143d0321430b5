"""Checkpoints of other producers: read exactly, and checked without a false alarm."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError
from sparkquant.formats import dequantize, stored_modules
from sparkquant.verification.gate import verify
from tests.checkpoints import read_raw, write_json
from tests.verification.conftest import findings
from tests.verification.producers import (
    PRODUCERS,
    Encoder,
    awq,
    encoded,
    fp8_block,
    gptq,
    modelopt_nvfp4,
    produce,
    rewrite,
)

AT = "model.language_model.layers."


def read_one(folder: Path, block: dict[str, Any], encode: Encoder, shape: tuple[int, int]) -> tuple[Any, Any, Any]:
    """One module of a shape through an encoder and the reader: checkpoint, module, what it stands for."""
    weight = np.random.default_rng(shape).standard_normal(shape)
    stored, stands = encode("m", weight, float(np.abs(weight).max()))
    folder.mkdir(exist_ok=True)
    rewrite(folder, {f"m.{suffix}": part for suffix, part in stored.items()})
    write_json(folder / "config.json", {"model_type": "qwen3_5", "quantization_config": block})
    checkpoint = Checkpoint.open(folder)
    return checkpoint, stored_modules(checkpoint)["m"], stands


@pytest.mark.parametrize("producer", PRODUCERS)
def test_weights_are_what_the_layout_says(producer: str, tmp_path: Path) -> None:
    made = produce(tmp_path, producer, layers=1)
    checkpoint = Checkpoint.open(made.out)
    modules = stored_modules(checkpoint)
    assert len(made.weights) == 6
    for name, expected in made.weights.items():
        module = modules[name]
        assert module.shape == expected.shape
        mine = dequantize(checkpoint, module)
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), torch.from_numpy(expected), rtol=3e-7, atol=0)
        rows = len(expected)
        assert torch.equal(dequantize(checkpoint, module, first=rows - 128, last=rows), mine[rows - 128 :])
    assert sum(module.scheme is not None for module in modules.values()) == 6


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 257), (200, 96), (384, 130)])
def test_edge_blocks(shape: tuple[int, int], tmp_path: Path) -> None:
    checkpoint, module, stands = read_one(tmp_path, FP8, fp8_block, shape)
    mine = dequantize(checkpoint, module)
    torch.testing.assert_close(mine.double(), torch.from_numpy(stands), rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("encode", "fields"),
    [
        (gptq(4, 32, symmetric=False), {"bits": 4, "group_size": 32, "sym": False}),
        (gptq(8, 64, symmetric=False), {"bits": 8, "group_size": 64, "sym": False}),
        (gptq(4, 256), {"bits": 4, "group_size": -1}),
        (gptq(4, 64, symmetric=False, less=0), {"group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"}),
        (gptq(4, 64, order="mixed"), {"group_size": 64, "desc_act": True}),
    ],
)
def test_gptq_variants(encode: Encoder, fields: dict[str, Any], tmp_path: Path) -> None:
    block = {"quant_method": "gptq", **fields}
    checkpoint, module, stands = read_one(tmp_path, block, encode, (96, 256))
    mine = dequantize(checkpoint, module)
    torch.testing.assert_close(mine.double(), torch.from_numpy(stands), rtol=3e-7, atol=0)
    assert torch.equal(dequantize(checkpoint, module, first=3, last=77), mine[3:77])


def test_auto_round_reads_its_own_packing_alike(tmp_path: Path) -> None:
    """The layer that AutoRound itself runs, fed with unit vectors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zp = pytest.importorskip("auto_round_extension.torch.qlinear_torch_zp")
    block = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "group_size": 64}
    for symmetric in (True, False):
        said = {**block, "sym": symmetric}
        checkpoint, module, _ = read_one(tmp_path, said, gptq(4, 64, symmetric=symmetric), (96, 128))
        layer = zp.QuantLinear(4, 64, 128, 96, bias=False)
        tensors = read_raw(tmp_path)
        layer.qweight = torch.frombuffer(bytearray(tensors["m.qweight"][2]), dtype=torch.int32).view(16, 96)
        layer.qzeros = torch.frombuffer(bytearray(tensors["m.qzeros"][2]), dtype=torch.int32).view(2, 12)
        layer.scales = torch.frombuffer(bytearray(tensors["m.scales"][2]), dtype=torch.float16).view(2, 96)
        theirs = layer(torch.eye(128, dtype=torch.float16)).t().float()
        torch.testing.assert_close(dequantize(checkpoint, module), theirs, rtol=2**-10, atol=1e-6)


def test_compressed_tensors_converts_awq_and_modelopt_alike(tmp_path: Path) -> None:
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    block = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    checkpoint, module, _ = read_one(tmp_path, block, awq(64), (64, 128))
    raw = {name: _tensor(value) for name, value in read_raw(tmp_path).items()}
    theirs = converters.AutoAWQConverter(group_size=64, ignore=()).process(dict(raw))
    codes = unpack_from_int32(theirs["m.weight_packed"], 4, torch.Size((64, 128)))
    zeros = unpack_from_int32(theirs["m.weight_zero_point"], 4, torch.Size((64, 2)), packed_dim=0)
    scale = theirs["m.weight_scale"].float()
    spread = (codes.float().view(64, 2, 64) - zeros.float().unsqueeze(-1)) * scale.unsqueeze(-1)
    assert torch.equal(dequantize(checkpoint, module), spread.view(64, 128))

    block = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    checkpoint, module, _ = read_one(tmp_path, block, modelopt_nvfp4(inputs=False), (64, 128))
    raw = {name: _tensor(value) for name, value in read_raw(tmp_path).items()}
    divisor = 1 / raw["m.weight_scale_2"]
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    fields = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    state = {
        "weight_packed": raw["m.weight"],
        "weight_scale": raw["m.weight_scale"],
        "weight_global_scale": divisor.reshape(1),
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=fields, format="nvfp4-pack-quantized")
    read = compressor.decompress(state, scheme)["weight"].float()
    torch.testing.assert_close(dequantize(checkpoint, module), read, rtol=2**-7, atol=1e-6)


def _tensor(raw: tuple[str, tuple[int, ...], bytes]) -> torch.Tensor:
    dtypes = {"I32": torch.int32, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}
    dtype = {**dtypes, "F8_E4M3": torch.float8_e4m3fn}[raw[0]]
    return torch.frombuffer(bytearray(raw[2]), dtype=dtype).view(raw[1])


def test_the_side_file_of_modelopt_is_enough(tmp_path: Path) -> None:
    made = produce(tmp_path, "modelopt w4a16 nvfp4", layers=1)
    config = json.loads((made.out / "config.json").read_text())
    block = config.pop("quantization_config")
    write_json(made.out / "config.json", config)
    said = {"quant_algo": block["quant_algo"], "group_size": 16, "exclude_modules": block["ignore"]}
    write_json(made.out / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": said})
    checkpoint = Checkpoint.open(made.out)
    modules = stored_modules(checkpoint)
    name, expected = next(iter(made.weights.items()))
    mine = dequantize(checkpoint, modules[name])
    torch.testing.assert_close(mine.double(), torch.from_numpy(expected), rtol=3e-7, atol=0)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_lost_scale_is_named(producer: str, tmp_path: Path) -> None:
    made = produce(tmp_path, producer, layers=1)
    tensors = read_raw(made.out)
    needed = ("weight_scale", "weight_scale_2", "weight_scale_inv", "scales", "qzeros")
    name = f"{AT}0.mlp.up_proj"
    for suffix in [s for s in needed if f"{name}.{s}" in tensors]:
        rewrite(made.out, {key: value for key, value in tensors.items() if key != f"{name}.{suffix}"})
        checkpoint = Checkpoint.open(made.out)
        with pytest.raises(CheckpointError, match=rf"up_proj\.{suffix} is not stored"):
            dequantize(checkpoint, stored_modules(checkpoint)[name])


def test_encoders_leave_the_rest_alone(tmp_path: Path) -> None:
    made = produce(tmp_path, "gptq", layers=1)
    before, after = read_raw(made.source), read_raw(made.out)
    assert all(after[name] == value for name, value in before.items() if name in after)
    assert len(encoded(before, gptq())[1]) == 6


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_good_checkpoint_has_no_finding(producer: str, tmp_path: Path) -> None:
    made = produce(tmp_path, producer)
    report = verify(made.out, source=made.source, level="deep")
    assert findings(report) == set(), report.to_json()


MOE = ("modelopt nvfp4", "modelopt mixed", "gptq", "awq", "auto-round", "fp8 block")


@pytest.mark.parametrize("producer", MOE)
def test_experts_have_no_finding(producer: str, tmp_path: Path) -> None:
    made = produce(tmp_path, producer, "qwen3_5_moe", fused_experts=False)
    report = verify(made.out, source=made.source)
    assert findings(report) == set(), report.to_json()
    text = produce(tmp_path / "text", producer, "qwen3_next", fused_experts=False)
    assert findings(verify(text.out, source=text.source)) == set()
