"""Checkpoints as other producers write them, by encoders of the published layouts that share nothing with the package.

made = produce(tmp_path, "modelopt nvfp4")     # made.source, made.out, made.weights (what the file stands for)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.checkpoints import RawTensors, build, read_raw, write_json, write_shards

Array = NDArray[Any]
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GATES = ("in_proj_a", "in_proj_b")


@dataclass(frozen=True)
class Made:
    """A result, its source, and the float64 weight of every quantized module."""

    source: Path
    out: Path
    weights: dict[str, Array]


Encoded = tuple[RawTensors, Array]
Encoder = Callable[[str, Array, float], Encoded]
"""(module, weight [N, K], largest magnitude of its fused group) -> stored tensors by suffix, what they stand for."""


def bfloat16(raw: tuple[str, tuple[int, ...], bytes]) -> Array:
    """A BF16 tensor as float64."""
    assert raw[0] == "BF16"
    return (np.frombuffer(raw[2], dtype="<u2").astype(np.uint32) << 16).view(np.float32).reshape(raw[1]).astype(float)


def fp8(values: Array) -> tuple[bytes, Array]:
    """E4M3 bytes and what they stand for."""
    rounded = torch.from_numpy(values.astype(np.float32)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy().tobytes(), rounded.double().numpy()


def floats(values: Array | float, shape: tuple[int, ...], dtype: str = "F32") -> tuple[str, tuple[int, ...], bytes]:
    """A float tensor."""
    return dtype, shape, np.asarray(values, dtype={"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def words(values: Array) -> tuple[str, tuple[int, ...], bytes]:
    """An I32 tensor."""
    return "I32", values.shape, values.astype("<u4").tobytes()


def pack(codes: Array, bits: int, axis: int, order: Iterable[int] | None = None) -> Array:
    """Codes along an axis into 32-bit words; `order[i]` is the code of a word that lies at its i-th place."""
    per_word = 32 // bits
    moved = np.moveaxis(codes, axis, -1)
    grouped = moved.reshape(*moved.shape[:-1], moved.shape[-1] // per_word, per_word).astype(np.uint64)
    places = list(order or range(per_word))
    packed = sum(grouped[..., code] << np.uint64(bits * place) for place, code in enumerate(places))
    return np.moveaxis(np.asarray(packed, dtype=np.uint32), -1, axis)


def modelopt_nvfp4(*, inputs: bool) -> Encoder:
    def encode(module: str, weight: Array, peak: float) -> Encoded:
        n, k = weight.shape
        multiplier = np.float32(peak / (448 * 6))
        blocks = weight.reshape(n, k // 16, 16)
        raw, scale = fp8(np.maximum(np.abs(blocks).max(-1) / 6 / multiplier, 2.0**-6))
        step = scale[..., None] * float(multiplier)
        code = np.abs(np.abs(blocks / step)[..., None] - E2M1).argmin(-1)
        nibbles = (code + 8 * (blocks < 0)).reshape(n, k).astype(np.uint8)
        stands = (np.sign(blocks) * E2M1[code] * step).reshape(n, k)
        stored: RawTensors = {
            "weight": ("U8", (n, k // 2), (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).tobytes()),
            "weight_scale": ("F8_E4M3", (n, k // 16), raw),
            "weight_scale_2": floats(multiplier, ()),
        }
        return stored | ({"input_scale": floats(0.01, ())} if inputs else {}), stands

    return encode


def fp8_tensor(*, inputs: bool, scale_shape: tuple[int, ...] = ()) -> Encoder:
    def encode(module: str, weight: Array, peak: float) -> Encoded:
        scale = np.float32(np.abs(weight).max() / 448)
        raw, values = fp8(weight / float(scale))
        stored: RawTensors = {
            "weight": ("F8_E4M3", weight.shape, raw),
            "weight_scale": floats(scale, scale_shape),
        }
        return stored | ({"input_scale": floats(0.02, ())} if inputs else {}), values * float(scale)

    return encode


def fp8_block(module: str, weight: Array, peak: float) -> Encoded:
    n, k = weight.shape
    scale = np.empty((-(-n // 128), -(-k // 128)), dtype=np.float32)
    spread = np.empty((n, k))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale[i, j] = np.abs(weight[part]).max() / 448
            spread[part] = float(scale[i, j])
    raw, values = fp8(weight / spread)
    stored: RawTensors = {
        "weight": ("F8_E4M3", (n, k), raw),
        "weight_scale_inv": floats(scale, scale.shape),
    }
    return stored, values * spread


def integer(bits: int, group: int, *, symmetric: bool) -> Callable[[Array], tuple[Array, Array, Array]]:
    """weight [N, K] -> codes [N, K], zero points [N, G], scales [N, G] as float16 holds them."""

    def encode(weight: Array) -> tuple[Array, Array, Array]:
        n, k = weight.shape
        top = 2**bits - 1
        pieces = weight.reshape(n, k // group, group)
        if symmetric:
            scale = np.abs(pieces).max(-1) / (2 ** (bits - 1) - 1)
        else:
            scale = (np.maximum(pieces.max(-1), 0) - np.minimum(pieces.min(-1), 0)) / top
        scale = np.maximum(scale, 1e-6).astype(np.float16).astype(float)
        zero = np.full(scale.shape, 2 ** (bits - 1)) if symmetric else np.round(-pieces.min(-1) / scale).clip(1, top)
        codes = np.round(pieces / scale[..., None] + zero[..., None]).clip(0, top).astype(int)
        return codes.reshape(n, k), zero.astype(int), scale

    return encode


def gptq(bits: int = 4, group: int = 128, *, symmetric: bool = True, less: int = 1, order: str = "") -> Encoder:
    """`less` is what the first format takes from zero points; `order` "plain" or "mixed" stores a g_idx."""

    def encode(module: str, weight: Array, peak: float) -> Encoded:
        k = weight.shape[1]
        turn = np.random.default_rng(k).permutation(k) if order == "mixed" else np.arange(k)
        index = np.empty(k, dtype=int)
        index[turn] = np.arange(k) // group
        codes, zero, scale = integer(bits, group, symmetric=symmetric)(weight[:, turn])
        original = np.empty_like(codes)
        original[:, turn] = codes
        stored: RawTensors = {
            "qweight": words(pack(original.T, bits, 0)),
            "qzeros": words(pack(zero.T - less, bits, 1)),
            "scales": floats(scale.T, scale.T.shape, "F16"),
        }
        if order:
            stored["g_idx"] = words(index)
        return stored, (original - zero[:, index]) * scale[:, index]

    return encode


def awq(group: int = 128) -> Encoder:
    def encode(module: str, weight: Array, peak: float) -> Encoded:
        codes, zero, scale = integer(4, group, symmetric=False)(weight)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        stored: RawTensors = {
            "qweight": words(pack(codes.T, 4, 1, order)),
            "qzeros": words(pack(zero.T, 4, 1, order)),
            "scales": floats(scale.T, scale.T.shape, "F16"),
        }
        n, k = codes.shape
        spread = (codes.reshape(n, -1, group) - zero[..., None]) * scale[..., None]
        return stored, spread.reshape(n, k)

    return encode


def is_quantized(module: str) -> bool:
    """Decoder Linears but gates and router."""
    leaf = module.rpartition(".")[2]
    return "_proj" in leaf and leaf not in (*GATES, "in_proj_ba") and not module.startswith(("mtp", "model.visual"))


def _modelopt(algorithm: str, plain: list[str]) -> dict[str, Any]:
    gates = [
        name for name in plain if name.endswith((*GATES, "in_proj_ba", "conv1d", "mlp.gate", "shared_expert_gate"))
    ]
    ignore = ["lm_head", *gates, "model.visual*", "mtp*"]
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore, "producer": {"name": "modelopt"}}


def _mixed_algorithm(module: str) -> dict[str, Any]:
    return {"quant_algo": "W4A16_NVFP4", "group_size": 16} if ".mlp." in module else {"quant_algo": "FP8"}


def _mixed(module: str, weight: Array, peak: float) -> Encoded:
    encode = modelopt_nvfp4(inputs=False) if ".mlp." in module else fp8_tensor(inputs=True)
    return encode(module, weight, peak)


def _auto_round(packing: str, plain: list[str], **fields: Any) -> dict[str, Any]:
    gates = {name: {"bits": 16, "data_type": "float"} for name in plain if name.endswith(("in_proj_a", "in_proj_ba"))}
    return {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
        "packing_format": packing, "block_name_to_quantize": "model.language_model.layers, model.layers",
        "extra_config": {**gates, r".*linear_attn\.in_proj_b.*": {"bits": 16, "data_type": "fp"}}, **fields,
    }  # fmt: skip


def _gptq(plain: list[str], **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, **fields}


def _awq(plain: list[str], listed: bool) -> dict[str, Any]:
    block = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    gates = sorted({f"linear_attn.{name.rpartition('.')[2]}" for name in plain if "in_proj_" in name})
    skipped = ["visual", "mtp", *gates, "lm_head"]
    return {**block, "modules_to_not_convert": skipped if listed else None}


def _fp8(plain: list[str], **fields: Any) -> dict[str, Any]:
    listed = [name for name in plain if "norm" not in name]
    return {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": listed, **fields}


Block = Callable[[list[str], list[str]], dict[str, Any]]
"""(plain modules, quantized modules) -> quantization_config"""

PRODUCERS: dict[str, tuple[Encoder, Block]] = {
    "modelopt nvfp4": (modelopt_nvfp4(inputs=True), lambda p, q: _modelopt("NVFP4", p)),
    "modelopt w4a16 nvfp4": (modelopt_nvfp4(inputs=False), lambda p, q: _modelopt("W4A16_NVFP4", p)),
    "modelopt fp8": (fp8_tensor(inputs=True), lambda p, q: _modelopt("FP8", p)),
    "modelopt mixed": (
        _mixed,
        lambda p, q: {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["mtp*"],
            "quantized_layers": {name: _mixed_algorithm(name) for name in q},
        },
    ),
    "gptq": (gptq(), lambda p, q: _gptq(p)),
    "gptq 8 bits, plain order": (gptq(8, order="plain"), lambda p, q: _gptq(p, bits=8)),
    "gptq v2": (gptq(less=0), lambda p, q: _gptq(p, checkpoint_format="gptq_v2")),
    "awq": (awq(), lambda p, q: _awq(p, True)),
    "awq derived": (awq(), lambda p, q: _awq(p, False)),
    "auto-round": (gptq(), lambda p, q: _auto_round("auto_round:auto_gptq", p)),
    "auto-round awq": (awq(), lambda p, q: _auto_round("auto_round:auto_awq", p, sym=False)),
    "fp8 block": (fp8_block, lambda p, q: _fp8(p, weight_block_size=[128, 128], activation_scheme="dynamic")),
    "fp8 tensor": (fp8_tensor(inputs=True), lambda p, q: _fp8(p, activation_scheme="static")),
}  # fmt: skip
"""Good checkpoints of every producer."""


def produce(folder: Path, producer: str, model_type: str = "qwen3_5", **options: Any) -> Made:
    """Write a source and what this producer makes of it."""
    encode, block = PRODUCERS[producer]
    source = build(model_type, folder / "source", **{"layers": 4, **options})
    out = build(model_type, folder / "out", **{"layers": 4, **options})
    stored, weights = encoded(read_raw(source), encode)
    rewrite(out, stored)
    modules = [name.removesuffix(".weight") for name, (_, shape, _) in read_raw(source).items() if len(shape) > 1]
    plain = [name for name in modules if name not in weights]
    config = json.loads((out / "config.json").read_text())
    write_json(out / "config.json", {**config, "quantization_config": block(plain, list(weights))})
    return Made(source, out, weights)


def encoded(tensors: RawTensors, encode: Encoder) -> tuple[RawTensors, dict[str, Array]]:
    """All tensors of a checkpoint with the decoder's Linears quantized, and what those stand for."""
    peaks: dict[str, float] = {}
    quantized = [name for name in tensors if name.endswith(".weight") and is_quantized(name.removesuffix(".weight"))]
    for name in quantized:
        parent = name.removesuffix(".weight").rpartition(".")[0]
        peaks[parent] = max(peaks.get(parent, 0.0), float(np.abs(bfloat16(tensors[name])).max()))
    stored: RawTensors = {}
    weights: dict[str, Array] = {}
    for name, value in tensors.items():
        if name not in quantized:
            stored[name] = value
            continue
        module = name.removesuffix(".weight")
        parts, weights[module] = encode(module, bfloat16(value), peaks[module.rpartition(".")[0]])
        stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    return stored, weights


def rewrite(folder: Path, tensors: RawTensors) -> None:
    """Replace all weights of a folder."""
    for shard in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        shard.unlink()
    write_shards(folder, tensors)
