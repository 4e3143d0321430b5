"""How a matrix is stored: formats as data and arithmetic, without torch.

A scheme answers three questions about a Linear [N, K] = [out, in]: can it take this shape (`problem`), which tensors
does it write (`outputs`), and which fields describe it (`hfconfig` spells them for compressed-tensors).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element for every dtype that a safetensors header may name (sub-byte types are refused)."""

GROUP_SIZES = (32, 64, 128)
"""Integer group sizes that Marlin takes (besides whole rows)."""

FP8_BLOCK = 128
NVFP4_BLOCK = 16


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One stored tensor: `name` is a suffix of the module here, a full name in a plan."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Payload in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A storage format for Linears.

    name        w4a16 | w8a16 | nvfp4a16 | fp8 | fp8_block
    bits        bits per stored weight
    group_size  inputs that share a scale; -1 is a whole row, 0 means that the format fixes it otherwise
    symmetric   integers only: no zero point
    format      the compressed-tensors compressor that reads it
    """

    name: str
    bits: int
    group_size: int
    symmetric: bool
    format: str

    @property
    def label(self) -> str:
        """Short unique text: `w4a16 g128`, `w4a16 g64 asym`, `fp8`."""
        if self.name not in ("w4a16", "w8a16"):
            return self.name
        width = "row" if self.group_size == -1 else f"g{self.group_size}"
        return f"{self.name} {width}" + ("" if self.symmetric else " asym")

    @property
    def is_integer(self) -> bool:
        """Packed integers with group scales."""
        return self.name in ("w4a16", "w8a16")

    def problem(self, shape: tuple[int, ...], *, tp: int = 1, row_parallel: bool = False) -> str | None:
        """Why a Linear of this shape [N, K] cannot be stored so, or None. Never raises.

        `tp` is a tensor-parallel size and `row_parallel` says that ranks share K rather than N: a scale group may not
        straddle two ranks.
        """
        if len(shape) != 2 or min(shape) < 1:
            return f"{self.label} needs a matrix, this tensor is {list(shape)}"
        if tp < 1:
            return f"tensor-parallel size {tp} is not positive"
        n, k = shape
        if tp > 1 and (k if row_parallel else n) % tp:
            return f"{'K' if row_parallel else 'N'}={k if row_parallel else n} does not divide over {tp} ranks"
        rank_n, rank_k = (n, k // tp) if row_parallel else (n // tp, k)
        where = f"K={k}" if tp == 1 or not row_parallel else f"K={k} over {tp} ranks = {rank_k}"
        if self.is_integer and self.group_size != -1 and rank_k % self.group_size:
            return f"{where} is not a multiple of the group size {self.group_size}"
        if self.is_integer and rank_k % (32 // self.bits):
            return f"{where} is not a multiple of {32 // self.bits}: {self.bits}-bit codes are packed into 32-bit words"
        if not self.symmetric and rank_n % (32 // self.bits):
            return f"N={rank_n} is not a multiple of {32 // self.bits}: zero points are packed along the outputs"
        if self.name == "nvfp4a16" and rank_k % NVFP4_BLOCK:
            return f"{where} is not a multiple of {NVFP4_BLOCK}"
        if self.name == "fp8_block" and tp > 1 and (rank_n % FP8_BLOCK or rank_k % FP8_BLOCK):
            return f"a rank's part [{rank_n}, {rank_k}] cuts a {FP8_BLOCK}x{FP8_BLOCK} block"
        return None

    def outputs(self, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        """The tensors stored for a Linear [N, K], names relative to the module, in name order."""
        n, k = shape
        if self.name == "fp8":
            return (OutputTensor("weight", "F8_E4M3", (n, k)), OutputTensor("weight_scale", "BF16", (n, 1)))
        if self.name == "fp8_block":
            blocks = (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
            return (OutputTensor("weight", "F8_E4M3", (n, k)), OutputTensor("weight_scale", "BF16", blocks))
        if self.name == "nvfp4a16":
            return (
                OutputTensor("weight_global_scale", "F32", (1,)),
                OutputTensor("weight_packed", "U8", (n, k // 2)),
                OutputTensor("weight_scale", "F8_E4M3", (n, k // NVFP4_BLOCK)),
            )
        per_word = 32 // self.bits
        groups = 1 if self.group_size == -1 else k // self.group_size
        stored = [
            OutputTensor("weight_packed", "I32", (n, k // per_word)),
            OutputTensor("weight_scale", "BF16", (n, groups)),
            OutputTensor("weight_shape", "I64", (2,)),
        ]
        if not self.symmetric:
            stored.append(OutputTensor("weight_zero_point", "I32", (n // per_word, groups)))
        return tuple(stored)

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Stored bytes of a Linear [N, K], scales included."""
        return sum(tensor.bytes for tensor in self.outputs(shape))

    @property
    def rounds_inputs(self) -> bool:
        """Whether engines round activations to FP8 on the fly, too."""
        return self.name in ("fp8", "fp8_block")

    def as_json(self) -> dict[str, Any]:
        """The scheme as a recipe would spell it, fully resolved."""
        fields: dict[str, Any] = {"scheme": self.name}
        if self.is_integer:
            fields |= {"group_size": self.group_size, "symmetric": self.symmetric}
        return fields


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("w4a16", 4, 128, True, "pack-quantized"),
        Scheme("w8a16", 8, 128, True, "pack-quantized"),
        Scheme("nvfp4a16", 4, NVFP4_BLOCK, True, "nvfp4-pack-quantized"),
        Scheme("fp8", 8, 0, True, "float-quantized"),
        Scheme("fp8_block", 8, 0, True, "float-quantized"),
    )
}
"""Every scheme with its default options."""

KEEP = "keep"
"""Spelled in a recipe: this class stays as it is, byte for byte."""


def make_scheme(name: str, *, group_size: int | None = None, symmetric: bool | None = None) -> Scheme:
    """A scheme by name with options; ValueError says what is wrong and what was perhaps meant."""
    scheme = SCHEMES.get(name)
    if scheme is None:
        near = difflib.get_close_matches(name, [*SCHEMES, KEEP], n=1)
        known = ", ".join([*SCHEMES, KEEP])
        raise ValueError(f"no scheme {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {known}"))
    if not scheme.is_integer and (group_size is not None or symmetric is not None):
        raise ValueError(f"{name} has no options: group_size and symmetric belong to w4a16 and w8a16")
    if group_size is not None:
        if group_size != -1 and group_size not in GROUP_SIZES:
            allowed = ", ".join(map(str, (-1, *GROUP_SIZES)))
            raise ValueError(f"group_size {group_size} is not one of {allowed}: Marlin refuses others")
        scheme = replace(scheme, group_size=group_size)
    if symmetric is False and name == "w8a16":
        raise ValueError("w8a16 is symmetric only: Marlin takes zero points with 4 bits alone")
    if symmetric is not None:
        scheme = replace(scheme, symmetric=symmetric)
    return scheme
