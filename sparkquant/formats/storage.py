"""The forms in which producers lay one Linear [N, K] out on disk: names, packing, dtypes, shapes. Without torch.

compressed-tensors  weight_packed [N, K / 8], weight_scale [N, K / g]; NVFP4 with a global divisor; FP8 `weight`
modelopt            `weight` of bytes [N, K / 2], weight_scale E4M3, weight_scale_2 a multiplier; FP8 by tensor
gptq, gptq_v2       qweight [K / 8, N], qzeros [K / g, N / 8], scales [K / g, N]; v1 stores zero points less one
awq                 qweight [K, N / 8] in the order of the gemm kernel, qzeros [K / g, N / 8], scales [K / g, N]
fp8                 `weight`, weight_scale_inv by block [N / 128, K / 128] (a multiplier, despite its name), or
                    weight_scale for the whole matrix
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from sparkquant.schemes import NVFP4_BLOCK, OutputTensor, Scheme


class Storage(StrEnum):
    """One form; see the module."""

    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    AWQ = "awq"
    FP8 = "fp8"

    @property
    def by_columns(self) -> bool:
        """Codes are stored [K, N]."""
        return self in (Storage.GPTQ, Storage.GPTQ_V2, Storage.AWQ)


ONE = (1,)
"""Shape of a single number; producers write it as [1] or []."""


def codes_suffix(scheme: Scheme, storage: Storage) -> str:
    """Name of the tensor with the codes."""
    if storage.by_columns:
        return "qweight"
    if storage is Storage.COMPRESSED_TENSORS and (scheme.is_integer or scheme.name == "nvfp4a16"):
        return "weight_packed"
    return "weight"


def scale_suffix(scheme: Scheme, storage: Storage) -> str:
    """Name of the tensor with the scales of rows, groups or blocks."""
    if storage.by_columns:
        return "scales"
    return "weight_scale_inv" if storage is Storage.FP8 and scheme.name == "fp8_block" else "weight_scale"


def matrix_of(scheme: Scheme, storage: Storage, codes: tuple[int, ...]) -> tuple[int, int]:
    """[N, K] from the shape of the codes."""
    rows, columns = codes
    per_word = 32 // scheme.bits
    if storage is Storage.AWQ:
        return columns * per_word, rows
    if storage.by_columns:
        return columns, rows * per_word
    if scheme.is_integer:
        return rows, columns * per_word
    return rows, columns * 2 if scheme.name == "nvfp4a16" else columns


def tensors_of(
    scheme: Scheme, storage: Storage, shape: tuple[int, ...], *, per_tensor: bool, static: bool
) -> tuple[OutputTensor, ...]:
    """Every tensor that a Linear [N, K] needs; `static` says that an input scale is stored."""
    if storage.by_columns:
        return _by_columns(scheme, storage, shape)
    stored = list(scheme.outputs(shape))
    if storage is Storage.COMPRESSED_TENSORS:
        if per_tensor:
            stored = [replace(t, shape=ONE) if t.name == "weight_scale" else t for t in stored]
        if static:
            nvfp4 = scheme.name == "nvfp4a16"
            stored.append(OutputTensor(*(("input_global_scale", "F32") if nvfp4 else ("input_scale", "BF16")), ONE))
        return tuple(stored)
    n, k = shape
    if scheme.name == "nvfp4a16":
        stored = [
            OutputTensor("weight", "U8", (n, k // 2)),
            OutputTensor("weight_scale", "F8_E4M3", (n, k // NVFP4_BLOCK)),
            OutputTensor("weight_scale_2", "F32", ONE),
        ]
    else:
        of_scale = ONE if per_tensor else (n,) if scheme.name == "fp8" else stored[1].shape
        stored = [stored[0], OutputTensor(scale_suffix(scheme, storage), "F32", of_scale)]
    return (*stored, OutputTensor("input_scale", "F32", ONE)) if static else tuple(stored)


def _by_columns(scheme: Scheme, storage: Storage, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
    n, k = shape
    per_word = 32 // scheme.bits
    groups = 1 if scheme.group_size == -1 else -(-k // scheme.group_size)
    return (
        OutputTensor("qweight", "I32", (k, n // per_word) if storage is Storage.AWQ else (k // per_word, n)),
        OutputTensor("qzeros", "I32", (groups, n // per_word)),
        OutputTensor("scales", "F16", (groups, n)),
    )
