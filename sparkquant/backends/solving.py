"""One matrix quantized with what calibration learned about its inputs: GPTQ, or a search weighted by input energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparkquant.backends.native import Quantity, encode, stored_tensors
from sparkquant.numerics.fp8 import Fp8Weights, dequantize_fp8_block, dequantize_fp8_channel
from sparkquant.numerics.gptq import Solved, gptq_fp8_block, gptq_fp8_channel, gptq_integer, gptq_nvfp4
from sparkquant.numerics.hessian import Energy, Factors, Hessian, factorize
from sparkquant.numerics.integer import IntegerWeights, dequantize_integer
from sparkquant.numerics.nvfp4 import dequantize_nvfp4
from sparkquant.schemes import FP8_BLOCK, Scheme

SOLVED_ELEMENTS = 2**26
"""Weights solved at once: rows are independent, and float32 copies of a large lm_head would not fit."""


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Everything calibration knows about the inputs of one fusion group (or of one expert's part of it)."""

    method: str
    tokens: int
    factors: Factors | None
    importance: Tensor | None

    @classmethod
    def of(cls, seen: Hessian | Energy | None, method: str, correction: float) -> Knowledge:
        """Prepare what was seen for `method` ("gptq" or "imatrix"); None, or no tokens, leaves the data-free search."""
        if seen is None or seen.tokens == 0:
            return cls(method, 0, None, None)
        if isinstance(seen, Hessian):
            return cls(method, seen.tokens, factorize(seen, correction=correction), None)
        return cls(method, seen.tokens, None, seen.importance)

    @property
    def used(self) -> str:
        """What is really done: the method, or `mse` where the calibration says nothing."""
        return self.method if self.factors is not None or self.importance is not None else "mse"


class Outcome(NamedTuple):
    """One quantized matrix: what is stored, what it stands for (float32 [N, K]), and squared output errors as shares of
    the outputs' squares on the calibration tokens (0 where nothing was known), also those of round to nearest.
    """

    stored: list[tuple[str, Tensor]]
    weight: Tensor
    error: float
    nearest_error: float


def solve(scheme: Scheme, weight: Tensor, divisor: float | None, knowledge: Knowledge) -> Outcome:
    """Quantize [N, K]; `divisor` is the NVFP4 global scale of its scale group. Work is cut into bands of rows."""
    rows, columns = weight.shape
    band = max(FP8_BLOCK, SOLVED_ELEMENTS // columns // FP8_BLOCK * FP8_BLOCK)
    parts = [_solve(scheme, weight[start : start + band], divisor, knowledge) for start in range(0, rows, band)]
    quantities = [part.tensors for part in parts]
    share = [part.weight.shape[0] / rows for part in parts]
    whole = quantities[0] if len(parts) == 1 else type(quantities[0])(*map(_stack, zip(*quantities, strict=True)))
    return Outcome(
        list(stored_tensors(scheme, whole, weight.shape, divisor)),
        torch.cat([part.weight for part in parts]) if len(parts) > 1 else parts[0].weight,
        sum(part.error * s for part, s in zip(parts, share, strict=True)),
        sum(part.nearest_error * s for part, s in zip(parts, share, strict=True)),
    )


def _stack(pieces: tuple[Tensor | None, ...]) -> Tensor | None:
    tensors = [piece for piece in pieces if piece is not None]
    return torch.cat(tensors) if tensors else None


def _solve(scheme: Scheme, weight: Tensor, divisor: float | None, knowledge: Knowledge) -> Solved[Any]:
    if knowledge.method == "imatrix" and knowledge.importance is not None:
        return _weighted(scheme, weight, divisor, knowledge.importance)
    if scheme.is_integer:
        options = {"bits": scheme.bits, "group_size": scheme.group_size}
        return gptq_integer(weight, knowledge.factors, **options, symmetric=scheme.symmetric)
    if divisor is not None:
        return gptq_nvfp4(weight, knowledge.factors, global_scale=divisor)
    return (gptq_fp8_block if scheme.name == "fp8_block" else gptq_fp8_channel)(weight, knowledge.factors)


def _weighted(scheme: Scheme, weight: Tensor, divisor: float | None, importance: Tensor) -> Solved[Any]:
    """Scale search with the squared error of each column weighted by the mean square of its input."""
    best = encode(scheme, weight, divisor, search=True, importance=importance)
    nearest = encode(scheme, weight, divisor, search=False)
    value = dequantize(scheme, best, divisor, weight.shape[1])
    errors = []
    for candidate in (value, dequantize(scheme, nearest, divisor, weight.shape[1])):
        errors.append(float(((candidate - weight.float()).square() * importance).sum()))
    energy = max(float((weight.float().square() * importance).sum()), torch.finfo(torch.float32).tiny)
    return Solved(best, value, errors[0] / energy, errors[1] / energy, "search")


def dequantize(scheme: Scheme, result: Quantity, divisor: float | None, columns: int) -> Tensor:
    """The float32 [N, K] that a quantized matrix stands for."""
    if isinstance(result, IntegerWeights):
        return dequantize_integer(result.packed, result.scale, result.zero_point, bits=scheme.bits)
    if isinstance(result, Fp8Weights):
        blocks = scheme.name == "fp8_block"
        return (dequantize_fp8_block if blocks else dequantize_fp8_channel)(result.values, result.scale)
    if divisor is None:
        raise ValueError(f"{scheme.label} [*, {columns}] needs a global scale")
    return dequantize_nvfp4(result.packed, result.scale, global_scale=divisor)
