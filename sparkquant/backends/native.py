"""The built-in, data-free backend: round to nearest, or the scale of least squared error, one unit at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sparkquant.backends import Unit
from sparkquant.decisions import Decision
from sparkquant.errors import NonFiniteWeight
from sparkquant.numerics.absmax import absmax
from sparkquant.numerics.fp8 import quantize_fp8_block, quantize_fp8_channel
from sparkquant.numerics.integer import quantize_integer
from sparkquant.numerics.nvfp4 import global_scale, quantize_nvfp4
from sparkquant.schemes import Scheme


class NativeBackend:
    """Methods `rtn` and `mse`."""

    def __init__(self, method: str) -> None:
        self._search = method == "mse"

    def quantize(self, unit: Unit, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.quantize`. Raises NonFiniteWeight naming tensor and index."""
        peaks = {d.tensor: _peaks(d, weights[d.tensor], unit.first) for d in unit.decisions}
        for index in range(unit.last - unit.first):
            peak = max(values[index] for values in peaks.values())
            for decision in unit.decisions:
                weight = weights[decision.tensor]
                for module, matrix in _matrices(decision, weight, index, unit.first + index):
                    for suffix, tensor in self._stored(_scheme(decision), matrix, peak):
                        yield f"{module}.{suffix}", tensor

    def _stored(self, scheme: Scheme, weight: Tensor, peak: float) -> Iterator[tuple[str, Tensor]]:
        """Output tensors of one matrix [N, K]; `peak` is the largest magnitude of its whole scale group."""
        if scheme.is_integer:
            packed = quantize_integer(
                weight,
                bits=scheme.bits,
                group_size=scheme.group_size,
                symmetric=scheme.symmetric,
                search=self._search,
            )
            yield "weight_packed", packed.packed
            yield "weight_scale", packed.scale
            yield "weight_shape", torch.tensor(weight.shape, dtype=torch.int64)
            if packed.zero_point is not None:
                yield "weight_zero_point", packed.zero_point
        elif scheme.name == "nvfp4a16":
            scale = global_scale(peak)
            codes, blocks = quantize_nvfp4(weight, global_scale=scale, search=self._search)
            yield "weight_packed", codes
            yield "weight_scale", blocks
            yield "weight_global_scale", torch.tensor([scale], dtype=torch.float32)
        else:
            by_block = scheme.name == "fp8_block"
            codes, scales = (quantize_fp8_block if by_block else quantize_fp8_channel)(weight, search=self._search)
            yield "weight", codes
            yield "weight_scale", scales


def _scheme(decision: Decision) -> Scheme:
    if decision.scheme is None:
        raise ValueError(f"{decision.tensor} is kept by the plan")
    return decision.scheme


def _matrices(decision: Decision, weight: Tensor, index: int, expert: int) -> Iterator[tuple[str, Tensor]]:
    """(module name, matrix) of one tensor, or of one expert of a fused tensor."""
    if not decision.parts:
        yield decision.module, weight
        return
    parent = decision.module.rpartition(".")[0]
    for part, rows in zip(decision.parts, weight[index].chunk(len(decision.parts), dim=0), strict=True):
        yield f"{parent}.{expert}.{part}", rows


def _peaks(decision: Decision, weight: Tensor, first: int) -> list[float]:
    """Largest magnitude of every matrix in `weight`; NonFiniteWeight at the first NaN or infinity."""
    peaks = []
    for index, matrix in enumerate(weight if decision.parts else (weight,)):
        peak, bad = absmax(matrix)
        if bad is not None:
            position = [first + index, *bad] if decision.parts else list(bad)
            raise NonFiniteWeight(
                f"{decision.tensor}: element {position} is {matrix[tuple(bad)].item()}",
                hint="the source is damaged: fetch the shard again, or ask its author",
            )
        peaks.append(peak)
    return peaks
