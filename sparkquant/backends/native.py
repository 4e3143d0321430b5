"""The built-in, data-free backend: round to nearest, or the scale of least squared error, one unit at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sparkquant.backends import Unit
from sparkquant.backends.matrices import unit_matrices, unit_peaks
from sparkquant.numerics.fp8 import Fp8Weights, quantize_fp8_block, quantize_fp8_channel
from sparkquant.numerics.integer import IntegerWeights, quantize_integer
from sparkquant.numerics.magnitude import NonFinite
from sparkquant.numerics.nvfp4 import Nvfp4Weights, global_scale, quantize_nvfp4
from sparkquant.schemes import Scheme

Quantity = IntegerWeights | Nvfp4Weights | Fp8Weights


class NativeBackend:
    """Methods `rtn` and `mse`."""

    def __init__(self, method: str) -> None:
        self._search = method == "mse"

    def reads(self, unit: Unit) -> bool:  # noqa: ARG002
        """Always: nothing else is known."""
        return True

    def quantize(self, unit: Unit, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.quantize`. Raises NonFiniteWeight naming tensor and index."""
        for module, scheme, matrix, peak in unit_matrices(unit, weights):
            scale = global_scale(peak) if scheme.name == "nvfp4a16" else None
            try:
                result = encode(scheme, matrix, scale, search=self._search, check=True)
            except NonFinite:
                unit_peaks(unit, weights)  # names tensor and index
                raise
            for suffix, tensor in stored_tensors(scheme, result, matrix.shape, scale):
                yield f"{module}.{suffix}", tensor


def encode(
    scheme: Scheme,
    weight: Tensor,
    divisor: float | None,
    *,
    search: bool,
    importance: Tensor | None = None,
    check: bool = False,
) -> Quantity:
    """Data-free quantization of one matrix [N, K]; `divisor` is the NVFP4 global scale of its scale group.

    With `check` an element that is not finite raises NonFinite (for NVFP4 the peak behind `divisor` has told).
    """
    if scheme.is_integer:
        return quantize_integer(
            weight,
            bits=scheme.bits,
            group_size=scheme.group_size,
            symmetric=scheme.symmetric,
            search=search,
            importance=importance,
            check=check,
        )
    if divisor is not None:
        return quantize_nvfp4(weight, global_scale=divisor, search=search, importance=importance)
    by_block = scheme.name == "fp8_block"
    quantize_fp8 = quantize_fp8_block if by_block else quantize_fp8_channel
    return quantize_fp8(weight, search=search, importance=importance, check=check)


def stored_tensors(
    scheme: Scheme, result: Quantity, shape: torch.Size, divisor: float | None
) -> Iterator[tuple[str, Tensor]]:
    """(suffix, tensor) of everything that is stored for one matrix of `shape`."""
    if isinstance(result, IntegerWeights):
        yield "weight_packed", result.packed
        yield "weight_scale", result.scale
        yield "weight_shape", torch.tensor(shape, dtype=torch.int64)
        if result.zero_point is not None:
            yield "weight_zero_point", result.zero_point
    elif isinstance(result, Nvfp4Weights):
        if divisor is None:
            raise ValueError(f"{scheme.label} needs a global scale")
        yield "weight_packed", result.packed
        yield "weight_scale", result.scale
        yield "weight_global_scale", torch.tensor([divisor], dtype=torch.float32)
    else:
        yield "weight", result.values
        yield "weight_scale", result.scale
