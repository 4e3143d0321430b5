"""The data-free methods by bands of rows that fit into a core's cache, through the compiled kernels. No torch.

A band needs nothing but its own rows (NVFP4 also the peak of its scale group), so any number of threads read, quantize
and store bands without waiting for each other, and no matrix is ever whole in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkquant.backends import Unit
from sparkquant.backends.planned import not_finite, planned_scheme
from sparkquant.decisions import Decision
from sparkquant.numerics.limits import global_scale
from sparkquant.numerics.machine import uses_kernels
from sparkquant.schemes import DTYPE_BYTES, FP8_BLOCK, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from sparkquant.numerics.arrays import Array

ELEMENTS = 2**18
"""Weights of a band: with what it becomes it stays in a second-level cache."""


Stored = list[tuple[str, int, Any]]
"""Suffix, byte offset in the stored tensor, bytes."""


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix of a unit: rows `first` to `first + rows` of its source tensor, seen as [*, columns]."""

    decision: Decision
    module: str
    scheme: Scheme
    expert: int
    first: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Band:
    """Rows `start` to `stop` of a Linear."""

    linear: Linear
    start: int
    stop: int

    @property
    def offset(self) -> int:
        """Where it begins in the source tensor, in bytes."""
        return (self.linear.first + self.start) * self.linear.columns * DTYPE_BYTES[self.linear.decision.dtype]

    @property
    def bytes(self) -> int:
        """Source bytes."""
        return (self.stop - self.start) * self.linear.columns * DTYPE_BYTES[self.linear.decision.dtype]


class BandBackend:
    """Methods `rtn` and `mse`: by bands where that is possible, whole tensors through torch elsewhere."""

    def __init__(self, method: str) -> None:
        self._method = method

    def reads(self, unit: Unit) -> bool:  # noqa: ARG002
        """Always: nothing else is known."""
        return True

    def quantize(self, unit: Unit, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.quantize`: the same bytes as by bands."""
        from sparkquant.backends.native import NativeBackend

        return NativeBackend(self._method).quantize(unit, weights)

    def takes(self, unit: Unit) -> bool:
        """Whether this unit goes by bands when its tensors lie in files: numba works and knows the dtypes."""
        return all(d.dtype in ("BF16", "F16", "F32") for d in unit.decisions) and uses_kernels()

    def encode(self, band: Band, raw: memoryview, peak: float | None) -> Stored:
        """What a band becomes.

        `peak` is that of the band's scale group, for NVFP4. Raises NonFiniteWeight naming tensor and index.
        """
        from sparkquant.numerics import arrays

        linear = band.linear
        codes = arrays.bits(raw, linear.decision.dtype)
        x = arrays.floats(codes, linear.decision.dtype).reshape(-1, linear.columns)
        search = self._method == "mse"
        if peak is not None and linear.scheme.name == "nvfp4a16":
            return _nvfp4(band, x, peak, search)
        finite, stored = (_integer if linear.scheme.is_integer else _fp8)(band, x, search)
        if not finite:
            _require_finite(band, codes)
        return stored


def bands(linear: Linear) -> Iterator[Band]:
    """Cut a Linear where no block of scales and no word of zero points is cut."""
    multiple = 1
    if linear.scheme.name == "fp8_block":
        multiple = FP8_BLOCK
    elif not linear.scheme.symmetric:
        multiple = 32 // linear.scheme.bits
    step = -(-ELEMENTS // linear.columns)
    step = -(-step // multiple) * multiple
    for start in range(0, linear.rows, step):
        yield Band(linear, start, min(start + step, linear.rows))


def linears(unit: Unit) -> Iterator[Linear]:
    """Everything in a unit that is quantized by itself, expert by expert."""
    for expert in range(unit.first, unit.last):
        for decision in unit.decisions:
            rows, columns = decision.shape[-2:]
            scheme = planned_scheme(decision)
            if not decision.parts:
                yield Linear(decision, decision.module, scheme, expert, 0, rows, columns)
                continue
            parent = decision.module.rpartition(".")[0]
            share = rows // len(decision.parts)
            for index, part in enumerate(decision.parts):
                first = expert * rows + index * share
                yield Linear(decision, f"{parent}.{expert}.{part}", scheme, expert, first, share, columns)


def needs_peaks(unit: Unit) -> bool:
    """Whether something in the unit shares one NVFP4 global scale."""
    return any(planned_scheme(decision).name == "nvfp4a16" for decision in unit.decisions)


def peak(band: Band, raw: memoryview) -> float:
    """Largest magnitude of a band. Raises NonFiniteWeight naming tensor and index."""
    from sparkquant.numerics import arrays

    return _require_finite(band, arrays.bits(raw, band.linear.decision.dtype))


def peaks_by_expert(found: Iterable[tuple[Band, float]]) -> dict[int, float]:
    """The peak of every scale group in a unit: one per expert, one for all of a unit of matrices."""
    peaks: dict[int, float] = {}
    for band, value in found:
        expert = band.linear.expert
        peaks[expert] = max(peaks.get(expert, 0.0), value)
    return peaks


def constants(linear: Linear, peak: float | None) -> Iterator[tuple[str, bytes]]:
    """(suffix, bytes) of the stored tensors that no band makes."""
    import numpy as np

    if linear.scheme.is_integer:
        yield "weight_shape", np.array([linear.rows, linear.columns], "<i8").tobytes()
    elif linear.scheme.name == "nvfp4a16" and peak is not None:
        yield "weight_global_scale", np.array([global_scale(peak)], "<f4").tobytes()


def _require_finite(band: Band, codes: Array) -> float:
    from sparkquant.numerics import arrays

    linear, dtype = band.linear, band.linear.decision.dtype
    most, index = arrays.scan(codes, dtype)
    if index is None:
        return most
    row, column = divmod(index, linear.columns)
    row += linear.first + band.start
    position = [row, column]
    if linear.decision.parts:
        position = [*divmod(row, linear.decision.shape[-2]), column]
    raise not_finite(linear.decision.tensor, position, arrays.value(codes[index], dtype))


def _integer(band: Band, x: Array, search: bool) -> tuple[bool, Stored]:
    import numpy as np

    from sparkquant.numerics import arrays

    scheme, rows = band.linear.scheme, len(x)
    groups = 1 if scheme.group_size == -1 else band.linear.columns // scheme.group_size
    packed = np.empty((rows, band.linear.columns * scheme.bits // 8), np.uint8)
    scale = np.empty((rows, groups), np.uint16)
    zeros = None if scheme.symmetric else np.empty((rows, groups), np.int8)
    finite = arrays.integer(x, packed, scale, zeros, bits=scheme.bits, search=search)
    stored: Stored = [
        ("weight_packed", band.start * packed.shape[1], packed.data),
        ("weight_scale", band.start * groups * 2, scale.data),
    ]
    if zeros is not None:
        words = arrays.pack_zero_points(zeros, scheme.bits)
        stored.append(("weight_zero_point", band.start * scheme.bits // 32 * groups * 4, words.data))
    return finite, stored


def _nvfp4(band: Band, x: Array, peak: float, search: bool) -> Stored:
    import numpy as np

    from sparkquant.numerics import arrays
    from sparkquant.numerics.limits import NVFP4_GROUP

    packed = np.empty((len(x), band.linear.columns // 2), np.uint8)
    scale = np.empty((len(x), band.linear.columns // NVFP4_GROUP), np.uint8)
    arrays.nvfp4(x, packed, scale, global_scale=global_scale(peak), search=search)
    return [
        ("weight_packed", band.start * packed.shape[1], packed.data),
        ("weight_scale", band.start * scale.shape[1], scale.data),
    ]


def _fp8(band: Band, x: Array, search: bool) -> tuple[bool, Stored]:
    import numpy as np

    from sparkquant.numerics import arrays

    rows, columns = x.shape
    height, width = (FP8_BLOCK, FP8_BLOCK) if band.linear.scheme.name == "fp8_block" else (1, columns)
    values = np.empty((rows, columns), np.uint8)
    scale = np.empty((-(-rows // height), -(-columns // width)), np.uint16)
    finite = arrays.fp8(x, values, scale, block=(height, width), search=search)
    return finite, [
        ("weight", band.start * columns, values.data),
        ("weight_scale", band.start // height * scale.shape[1] * 2, scale.data),
    ]
