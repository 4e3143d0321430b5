"""A quantized module of any producer said again in compressed-tensors, without rounding anything.

    gptq, autoround  codes turned and packed along the inputs; zero points dropped where all are the middle
    awq              the same, from the order of the gemm kernel
    modelopt         NVFP4 codes and block scales as they are, the global multiplier as a divisor; FP8 as it is
    fp8              as it is: its inverse scale is a multiplier already

What cannot be said without another rounding is a Problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparkquant.checkpoint import TensorHeader
from sparkquant.errors import Problem
from sparkquant.formats.dequantization import AWQ_SHIFTS
from sparkquant.formats.storage import Storage
from sparkquant.formats.stored import StoredModule, StoredScheme
from sparkquant.hfconfig import scheme_arguments
from sparkquant.numerics.pack import pack_int32, pack_zero_points
from sparkquant.reading import DTYPE_NAMES, ShardReader
from sparkquant.schemes import OutputTensor

ORDERS = ("g_idx", "weight_g_idx")


@dataclass(frozen=True)
class Restated:
    """One module as it will be stored.

    copied  suffix -> source header of what is taken byte for byte, in the shape of `outputs`
    made    computes the other tensors by suffix
    """

    name: str
    scheme: StoredScheme
    outputs: tuple[OutputTensor, ...]
    copied: Mapping[str, TensorHeader]
    made: Callable[[ShardReader], Mapping[str, Tensor]]


def restate(module: StoredModule, reader: ShardReader) -> Restated | Problem:
    """The module in compressed-tensors form; a Problem when numbers would change."""
    assert module.scheme is not None
    if problem := _order(module, reader):
        return problem
    storage = module.scheme.storage
    if storage.by_columns:
        return _integers(module, reader)
    renamed, made = _names(module.scheme), dict[str, OutputTensor]()
    copied: dict[str, TensorHeader] = {}
    for suffix, header in module.tensors.items():
        if suffix in ORDERS:
            continue
        name = renamed.get(suffix, suffix)
        if storage is Storage.MODELOPT and suffix in _RECIPROCAL and module.scheme.scheme.name == "nvfp4a16":
            made[_RECIPROCAL[suffix]] = OutputTensor(_RECIPROCAL[suffix], "F32", (1,))
        elif suffix == "pre_quant_scale":
            return Problem(header.name, "scales the inputs, which compressed-tensors cannot say")
        else:
            copied[name] = header
    shapes = {name: _shape(name, header.shape, module.scheme) for name, header in copied.items()}
    outputs = [OutputTensor(name, header.dtype, shapes[name]) for name, header in copied.items()]
    scheme = replace(module.scheme, storage=Storage.COMPRESSED_TENSORS)
    make = partial(_divisors, module) if made else _nothing
    return Restated(module.name, scheme, (*outputs, *made.values()), copied, make)


_RECIPROCAL = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
"""ModelOpt's multipliers of NVFP4 and the divisors that compressed-tensors keeps instead."""


def _nothing(reader: ShardReader) -> Mapping[str, Tensor]:  # noqa: ARG001
    return {}


def _names(scheme: StoredScheme) -> Mapping[str, str]:
    if scheme.storage is Storage.MODELOPT and scheme.scheme.name == "nvfp4a16":
        return {"weight": "weight_packed"}
    return {"weight_scale_inv": "weight_scale"} if scheme.storage is Storage.FP8 else {}


def _shape(name: str, shape: tuple[int, ...], scheme: StoredScheme) -> tuple[int, ...]:
    """Single numbers are [1] and scales of rows [N, 1]; the bytes are the same."""
    if not shape:
        return (1,)
    return (*shape, 1) if name == "weight_scale" and len(shape) == 1 and not scheme.per_tensor else shape


def _order(module: StoredModule, reader: ShardReader) -> Problem | None:
    """An activation order can only be said by engines that newer ones refuse to be; the plain order says nothing."""
    assert module.scheme is not None
    for suffix in ORDERS:
        header = module.tensors.get(suffix)
        if header is None or module.shape is None:
            continue
        columns, size = module.shape[1], module.scheme.scheme.group_size
        plain = torch.arange(columns) // (columns if size == -1 else size)
        if not torch.equal(reader.read(header.name).long().reshape(-1), plain):
            return Problem(header.name, "is an activation order, which newer engines refuse")
    return None


def _divisors(module: StoredModule, reader: ShardReader) -> Mapping[str, Tensor]:
    found = {suffix: module.tensors[suffix] for suffix in _RECIPROCAL if suffix in module.tensors}
    return {_RECIPROCAL[suffix]: divisor_of(reader.read(header.name)) for suffix, header in found.items()}


def divisor_of(multiplier: Tensor) -> Tensor:
    """The float32 [1] whose reciprocal is the multiplier, exactly where there is one, else nearest to it."""
    wanted = multiplier.float().reshape(1)
    middle = 1 / wanted
    around = torch.cat([middle, torch.nextafter(middle, middle * 2), torch.nextafter(middle, middle * 0)])
    return around[(1 / around - wanted).abs().argmin()].reshape(1)


def _integers(module: StoredModule, reader: ShardReader) -> Restated | Problem:
    """GPTQ and AWQ: [K, N] words and zero points become [N, K] words, the scales are turned."""
    assert module.scheme is not None
    scheme, middle = module.scheme.scheme, 2 ** (module.scheme.scheme.bits - 1)
    zeros = _zero_points(module, reader)
    if int(zeros.max()) >= 2 * middle:
        return Problem(module.tensors["qzeros"].name, f"holds the zero point {int(zeros.max())}, above the codes")
    symmetric = bool((zeros == middle).all())
    scheme = replace(scheme, symmetric=symmetric)
    shape = module.shape
    if shape is None:
        return Problem(module.name, "its codes are no matrix")
    if reason := scheme.problem(shape):
        return Problem(module.name, reason)
    if not symmetric and scheme.bits == 8:
        return Problem(module.name, "has zero points with 8 bits, which Marlin takes with 4 alone")
    scales = module.tensors["scales"]
    kinds = {"weight_scale": (scales.dtype, (scales.shape[1], scales.shape[0]))}
    outputs = [replace(o, dtype=kinds[o.name][0]) if o.name in kinds else o for o in scheme.outputs(shape)]
    stored = replace(module.scheme, scheme=scheme, storage=Storage.COMPRESSED_TENSORS)
    return Restated(module.name, stored, tuple(outputs), {}, partial(_turned, module, symmetric))


def _turned(module: StoredModule, symmetric: bool, reader: ShardReader) -> Mapping[str, Tensor]:
    assert module.scheme is not None
    assert module.shape is not None
    bits = module.scheme.scheme.bits
    middle = 2 ** (bits - 1)
    words = reader.read(module.tensors["qweight"].name)
    if module.scheme.storage is Storage.AWQ:
        codes = _unpacked(words, bits, AWQ_SHIFTS)
    else:
        codes = _unpacked(words.t(), bits, range(0, 32, bits)).t()
    stored = {
        "weight_packed": pack_int32((codes.t() - middle).to(torch.int8).contiguous(), bits),
        "weight_scale": reader.read(module.tensors["scales"].name).t().contiguous(),
        "weight_shape": torch.tensor(module.shape, dtype=torch.int64),
    }
    if not symmetric:
        zeros = _zero_points(module, reader) - middle
        stored["weight_zero_point"] = pack_zero_points(zeros.t().to(torch.int8).contiguous(), bits)
    return stored


def _zero_points(module: StoredModule, reader: ShardReader) -> Tensor:
    """[G, N], as what is subtracted from the codes."""
    assert module.scheme is not None
    bits, storage = module.scheme.scheme.bits, module.scheme.storage
    words = reader.read(module.tensors["qzeros"].name)
    zeros = _unpacked(words, bits, AWQ_SHIFTS if storage is Storage.AWQ else range(0, 32, bits))
    return zeros + 1 if storage is Storage.GPTQ else zeros


def _unpacked(words: Tensor, bits: int, shifts: Any) -> Tensor:
    """Values [R, C] of int32 words [R, C * bits / 32]."""
    spread = words.unsqueeze(-1) >> torch.tensor(list(shifts), dtype=torch.int32)
    values: Tensor = (spread & (2**bits - 1)).flatten(-2)
    return values


def group_arguments(stored: StoredScheme) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """`weights` and `input_activations` of a group, activations as the producer declared them."""
    weights, inputs = scheme_arguments(stored.scheme)
    if stored.per_tensor:
        weights = {**weights, "strategy": "tensor"}
    if stored.inputs == "none":
        return weights, None
    if stored.inputs == "dynamic":
        return weights, inputs
    base = {"type": "float", "symmetric": True}
    if stored.scheme.name == "nvfp4a16":
        return weights, {"num_bits": 4, **base, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    return weights, {"num_bits": 8, **base, "strategy": "tensor", "dynamic": False}


def dtype_name(tensor: Tensor) -> str:
    """As safetensors spells it."""
    return DTYPE_NAMES[tensor.dtype]
