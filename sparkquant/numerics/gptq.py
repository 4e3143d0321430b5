"""Calibrated quantization: scales by weighted search, codes by GPTQ, then codes and scales improved in turn.

Measured as KL of a trained hybrid, each of these lowers it: columns in the order of falling input energy while groups
stay where they are (no index is stored), half a step towards the source model's outputs (`hessian`), strong damping,
three rounds of refitting scales and descending on codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparkquant.numerics import columns, pack
from sparkquant.numerics.fp8 import Fp8Weights, quantize_fp8_block, quantize_fp8_channel
from sparkquant.numerics.grid import Grid, float_grid
from sparkquant.numerics.hessian import Factors
from sparkquant.numerics.integer import IntegerWeights, quantize_integer
from sparkquant.numerics.limits import E2M1_MAX, E4M3_MAX, asymmetric_limit, symmetric_limit
from sparkquant.numerics.limits import NVFP4_GROUP as GROUP
from sparkquant.numerics.nvfp4 import Nvfp4Weights, quantize_nvfp4
from sparkquant.numerics.rounding import e2m1_code, e2m1_value, to_bfloat16, to_e4m3

Tensors = TypeVar("Tensors", IntegerWeights, Nvfp4Weights, Fp8Weights)

ROUNDS = 2
SWEEPS = 2


class Solved(NamedTuple, Generic[Tensors]):
    """A quantized weight and how near its outputs come to the target's."""

    tensors: Tensors
    """what is stored, as the data-free function of the format returns it"""
    weight: Tensor
    """float32 [N, K], what the stored tensors stand for"""
    error: float
    """sum of squared output errors on the calibration tokens, as a share of the outputs' squares"""
    nearest_error: float
    """the same for round to nearest"""
    method: Literal["gptq", "search"]
    """`search` when the Hessian was unusable: only the scales were searched"""


def gptq_integer(
    weight: Tensor, factors: Factors | None, *, bits: int, group_size: int, symmetric: bool
) -> Solved[IntegerWeights]:
    """Quantize [N, K] to 4 or 8 bits with a scale per `group_size` columns (-1: per row); see `quantize_integer`.

    `factors` come from `factorize`; None, which it gives for a useless Hessian, means a scale search without weights.
    Raises ValueError on another shape, or when `factors` are not of K columns.
    """
    return _solve(weight, factors, _Integer(bits, group_size, symmetric))


def gptq_nvfp4(weight: Tensor, factors: Factors | None, *, global_scale: float) -> Solved[Nvfp4Weights]:
    """Quantize [N, K] to NVFP4 with the divisor of its fusion group; otherwise as `gptq_integer`."""
    return _solve(weight, factors, _Nvfp4(global_scale))


def gptq_fp8_channel(weight: Tensor, factors: Factors | None) -> Solved[Fp8Weights]:
    """Quantize [N, K] to FP8 with a scale per row; otherwise as `gptq_integer`."""
    return _solve(weight, factors, _Fp8(None))


def gptq_fp8_block(weight: Tensor, factors: Factors | None, *, block: int = 128) -> Solved[Fp8Weights]:
    """Quantize [N, K] to FP8 with a scale per `block` x `block`; otherwise as `gptq_integer`."""
    return _solve(weight, factors, _Fp8(block))


class _Format(ABC, Generic[Tensors]):
    """A format as the solver sees it: `band` rows share a scale; `refits` where better scales are worth a search."""

    band: int = 1
    refits: bool = True

    @abstractmethod
    def encode(self, weight: Tensor, *, search: bool, importance: Tensor | None = None) -> Tensors:
        """Data-free quantization."""

    @abstractmethod
    def unpack(self, tensors: Tensors, columns: int) -> tuple[Tensor, Grid]:
        """Codes float32 [N, K] and their grid."""

    @abstractmethod
    def pack(self, codes: Tensor, grid: Grid) -> Tensors:
        """The inverse of `unpack`."""

    @abstractmethod
    def storable(self, wanted: Tensor, step: Tensor) -> Tensor:
        """Wanted steps rounded to the format, the old step where that is useless."""


class _Integer(_Format[IntegerWeights]):
    def __init__(self, bits: int, group_size: int, symmetric: bool) -> None:
        self.bits, self.group_size, self.symmetric = bits, group_size, symmetric
        self._limit = (symmetric_limit if symmetric else asymmetric_limit)(bits)

    def encode(self, weight: Tensor, *, search: bool, importance: Tensor | None = None) -> IntegerWeights:
        return quantize_integer(
            weight,
            bits=self.bits,
            group_size=self.group_size,
            symmetric=self.symmetric,
            search=search,
            importance=importance,
        )

    def unpack(self, tensors: IntegerWeights, columns: int) -> tuple[Tensor, Grid]:
        step = tensors.scale.float()
        zero = torch.zeros_like(step)
        if tensors.zero_point is not None:
            zero = pack.unpack_zero_points(tensors.zero_point, self.bits, step.shape[0]).float()
        size = columns // step.shape[1]
        codes = pack.unpack_int32(tensors.packed, self.bits, columns).float() - zero.repeat_interleave(size, 1)
        low = -(2.0 ** (self.bits - 1)) - zero
        return codes, Grid(step, low, low + (2.0**self.bits - 1), size, 0.0, 0.0)

    def pack(self, codes: Tensor, grid: Grid) -> IntegerWeights:
        zero = -(2.0 ** (self.bits - 1)) - grid.low
        stored = (codes + zero.repeat_interleave(grid.size, 1)).to(torch.int8)
        zeros = None if self.symmetric else pack.pack_zero_points(zero.to(torch.int8), self.bits)
        return IntegerWeights(pack.pack_int32(stored, self.bits), grid.step.to(torch.bfloat16), zeros)

    def storable(self, wanted: Tensor, step: Tensor) -> Tensor:
        rounded = to_bfloat16(wanted)
        return torch.where((rounded * step > 0) & (rounded.abs() <= self._limit), rounded, step)


class _Nvfp4(_Format[Nvfp4Weights]):
    def __init__(self, global_scale: float) -> None:
        self.global_scale = global_scale

    def encode(self, weight: Tensor, *, search: bool, importance: Tensor | None = None) -> Nvfp4Weights:
        return quantize_nvfp4(weight, global_scale=self.global_scale, search=search, importance=importance)

    def unpack(self, tensors: Nvfp4Weights, columns: int) -> tuple[Tensor, Grid]:  # noqa: ARG002
        step = self._step(tensors.scale)
        codes = e2m1_value(pack.unpack_nibbles(tensors.packed))
        return codes, float_grid(step, GROUP, top=E2M1_MAX, least=1.0, mantissa=1)

    def pack(self, codes: Tensor, grid: Grid) -> Nvfp4Weights:
        return Nvfp4Weights(pack.pack_nibbles(e2m1_code(codes)), self._scale(grid.step))

    def storable(self, wanted: Tensor, step: Tensor) -> Tensor:  # noqa: ARG002
        return self._step(self._scale(wanted))

    def _scale(self, step: Tensor) -> Tensor:
        return to_e4m3((step * self.global_scale).clamp(2.0**-6, E4M3_MAX))

    def _step(self, scale: Tensor) -> Tensor:
        return scale.float() / torch.tensor(self.global_scale, device=scale.device)


class _Fp8(_Format[Fp8Weights]):
    refits = False

    def __init__(self, block: int | None) -> None:
        self.block, self.band = block, block or 1

    def encode(self, weight: Tensor, *, search: bool, importance: Tensor | None = None) -> Fp8Weights:
        if self.block is None:
            return quantize_fp8_channel(weight, search=search, importance=importance)
        return quantize_fp8_block(weight, block=self.block, search=search, importance=importance)

    def unpack(self, tensors: Fp8Weights, columns: int) -> tuple[Tensor, Grid]:
        step = tensors.scale.float().repeat_interleave(self.band, 0)[: tensors.values.shape[0]]
        return tensors.values.float(), float_grid(step, self.block or columns, top=E4M3_MAX, least=2.0**-6, mantissa=3)

    def pack(self, codes: Tensor, grid: Grid) -> Fp8Weights:
        return Fp8Weights(to_e4m3(codes), grid.step[:: self.band].to(torch.bfloat16))

    def storable(self, wanted: Tensor, step: Tensor) -> Tensor:  # noqa: ARG002
        return step


def _solve(weight: Tensor, factors: Factors | None, form: _Format[Tensors]) -> Solved[Tensors]:
    if weight.ndim != 2:
        raise ValueError(f"a calibrated weight has shape [N, K], got {tuple(weight.shape)}")
    if factors is None:
        tensors = form.encode(weight, search=True)
        codes, grid = form.unpack(tensors, weight.shape[1])
        return Solved(tensors, codes * grid.spread(weight.shape[1]), 0.0, 0.0, "search")
    if factors.damped.shape[0] != weight.shape[1]:
        raise ValueError(f"the Hessian has {factors.damped.shape[0]} columns, the weight {weight.shape[1]}")
    target = factors.target(weight).contiguous()
    codes, grid = _refine(target, factors, form)
    plain, plain_grid = form.unpack(form.encode(weight, search=False), weight.shape[1])
    errors = factors.row_errors(codes * grid.spread(weight.shape[1]) - target)
    plain_errors = factors.row_errors(plain * plain_grid.spread(weight.shape[1]) - target)
    worse = _bands(errors, form.band) > _bands(plain_errors, form.band)
    worse = worse.repeat_interleave(form.band)[: weight.shape[0], None]
    codes = torch.where(worse, plain, codes)
    step, low, high = (torch.where(worse, *pair) for pair in zip(plain_grid[:3], grid[:3], strict=True))
    grid = grid._replace(step=step, low=low, high=high)
    errors = torch.where(worse[:, 0], plain_errors, errors)
    whole = max(float(factors.row_errors(target).sum()), torch.finfo(torch.float32).tiny)
    shares = float(errors.sum()) / whole, float(plain_errors.sum()) / whole
    return Solved(form.pack(codes, grid), codes * grid.spread(weight.shape[1]), *shares, "gptq")


def _refine(target: Tensor, factors: Factors, form: _Format[Tensors]) -> tuple[Tensor, Grid]:
    importance = factors.damped.diagonal().contiguous()
    _, grid = form.unpack(form.encode(target, search=True, importance=importance), target.shape[1])
    codes = columns.round_columns(target, factors, grid)
    for _ in range(ROUNDS):
        slope = columns.gradient(codes, target, factors, grid)
        if form.refits:
            grid = columns.refit(codes, slope, factors, grid, form.storable)
        columns.descend(codes, slope, factors, grid, sweeps=SWEEPS)
    return codes, grid


def _bands(errors: Tensor, band: int) -> Tensor:
    """Sums over `band` rows."""
    padded = torch.nn.functional.pad(errors, (0, -errors.shape[0] % band))
    return padded.view(-1, band).sum(1)
