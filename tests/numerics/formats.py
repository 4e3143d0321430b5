"""Every format under one shape for the tests: quantize to the stored tensors, dequantize them, group the errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparkquant import numerics


class Format(NamedTuple):
    name: str
    quantize: Callable[..., tuple[Tensor | None, ...]]
    """weight, search=, importance= -> the tensors on disk"""
    dequantize: Callable[[tuple[Tensor | None, ...], Tensor], Tensor]
    """the tensors on disk, the weight (for its size and range) -> float32"""
    group: Callable[[Tensor], Tensor]
    """[N, K] -> [groups, elements of one scale]"""

    def __repr__(self) -> str:
        return self.name


def _rows_of(size: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.reshape(-1, x.shape[1] if size == -1 else size)


def _blocks(x: Tensor) -> Tensor:
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 128, 0, -x.shape[0] % 128))
    return x.view(x.shape[0] // 128, 128, x.shape[1] // 128, 128).transpose(1, 2).reshape(-1, 128 * 128)


def _integer(bits: int, group_size: int, symmetric: bool) -> Format:
    def quantize(weight: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
        return numerics.quantize_integer(weight, bits=bits, group_size=group_size, symmetric=symmetric, **options)

    def dequantize(stored: tuple[Any, ...], weight: Tensor) -> Tensor:
        return numerics.dequantize_integer(*stored, bits=bits, columns=weight.shape[-1])

    kind = "symmetric" if symmetric else "asymmetric"
    return Format(f"int{bits}-{kind}-g{group_size}", quantize, dequantize, _rows_of(group_size))


def divisor(weight: Tensor) -> float:
    return numerics.global_scale(numerics.absmax(weight).amax)


NVFP4 = Format(
    "nvfp4",
    lambda weight, **options: numerics.quantize_nvfp4(weight, global_scale=divisor(weight), **options),
    lambda stored, weight: numerics.dequantize_nvfp4(*stored, global_scale=divisor(weight)),  # type: ignore[arg-type]
    _rows_of(16),
)
FP8_CHANNEL = Format(
    "fp8-channel",
    numerics.quantize_fp8_channel,
    lambda stored, _: numerics.dequantize_fp8_channel(*stored),  # type: ignore[arg-type]
    _rows_of(-1),
)
FP8_BLOCK = Format(
    "fp8-block",
    numerics.quantize_fp8_block,
    lambda stored, _: numerics.dequantize_fp8_block(*stored),  # type: ignore[arg-type]
    _blocks,
)
INT4, INT4_ZERO_POINT = _integer(4, 128, True), _integer(4, 128, False)
INT8, INT8_ZERO_POINT = _integer(8, 128, True), _integer(8, 128, False)
FORMATS = (
    INT4,
    INT4_ZERO_POINT,
    _integer(4, -1, True),
    INT8,
    INT8_ZERO_POINT,
    NVFP4,
    FP8_CHANNEL,
    FP8_BLOCK,
)


def same_bytes(left: tuple[Tensor | None, ...], right: tuple[Tensor | None, ...]) -> bool:
    """Equal dtypes, shapes and bytes, tensor by tensor."""
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif a.dtype != b.dtype or a.shape != b.shape or not torch.equal(raw(a), raw(b)):
            return False
    return True


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def weights(rows: int = 64, columns: int = 512, seed: int = 0) -> Tensor:
    """Bell-shaped bfloat16 weights of about +-0.1, from integer arithmetic only: the same on every platform."""
    state = torch.arange(rows * columns * 4, dtype=torch.int64) + 4 * rows * columns * seed
    for multiplier in (0x9E3779B1, 0x85EBCA6B):
        state = (state * multiplier + 0x7F4A7C15) % 2**32
        state = state ^ (state >> 15)
    uniform = (state % 2**16).view(rows, columns, 4) - 2**15
    bell = uniform.sum(-1)
    return (bell * (2**17 + bell.abs())).float().mul(2.0**-38).bfloat16()


def adversarial(rows: int = 7, columns: int = 256) -> dict[str, Tensor]:
    """Inputs that break careless arithmetic; every one is finite."""
    base = weights(rows, columns).float()
    outlier = base.clone()
    outlier[0, 3], outlier[1, 130] = 3e4, -3e4
    sparse = base.clone()
    sparse[::2] = 0
    sparse[1, :128] = -0.0
    spread = base.sign() * 2.0 ** torch.linspace(-149, 126, rows * columns).view(rows, columns)
    return {
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "float32": base,
        "outlier": outlier.bfloat16(),
        "zeros": torch.zeros(rows, columns),
        "negative-zeros": torch.full((rows, columns), -0.0).bfloat16(),
        "zero-groups": sparse,
        "denormal": base * 1e-38,
        "smallest": torch.full((rows, columns), 2.0**-149),
        "huge": torch.full((rows, columns), torch.finfo(torch.float32).max) * base.sign(),
        "huge-bfloat16": torch.full((rows, columns), torch.finfo(torch.bfloat16).max).bfloat16(),
        "spread": spread,
        "constant": torch.full((rows, columns), 0.37).bfloat16(),
        "negative": -base.abs().bfloat16(),
        "one-element": torch.nn.functional.pad(torch.tensor([[-1.5]]), (0, columns - 1)).expand(rows, -1).contiguous(),
    }
