"""Stored tensors back to float32, by the rules of `sparkquant.numerics`; the one part of reading that needs torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError
from sparkquant.formats.stored import StoredModule
from sparkquant.numerics.fp8 import dequantize_fp8_block, dequantize_fp8_channel
from sparkquant.numerics.integer import dequantize_integer
from sparkquant.numerics.nvfp4 import dequantize_nvfp4
from sparkquant.reading import ShardReader
from sparkquant.schemes import FP8_BLOCK

_HINT = "`sparkquant verify` names everything that is wrong with the folder"


def dequantized_rows(checkpoint: Checkpoint, module: StoredModule, first: int = 0, last: int | None = None) -> Tensor:
    """The float32 weight of a module, or some of its rows."""
    with ShardReader(checkpoint) as reader:
        if module.scheme is None:
            plain = module.tensors.get("weight", module.tensors.get(""))
            if plain is None or module.is_quantized:
                raise CheckpointError(f"{module.name}: no scheme is declared for its tensors", hint=_HINT)
            return reader.read(plain.name, first=first, last=last).float()
        try:
            return _rows(reader, module, first, last)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{module.name}: its tensors do not fit its scheme: {error}", hint=_HINT) from None


def _rows(reader: ShardReader, module: StoredModule, first: int, last: int | None) -> Tensor:
    assert module.scheme is not None
    scheme = module.scheme.scheme
    shape = module.shape
    if shape is None:
        raise ValueError("the codes are no matrix")
    last = shape[0] if last is None else last
    if not 0 <= first < last <= shape[0]:
        raise ValueError(f"there are no rows {first}:{last} of {shape[0]}")

    def rows(suffix: str, step: int = 1) -> Tensor:
        return reader.read(module.tensors[suffix].name, first=first // step, last=-(-last // step))

    def whole(suffix: str) -> Tensor:
        return reader.read(module.tensors[suffix].name)

    if scheme.is_integer:
        per_word = 32 // scheme.bits
        zero = None if scheme.symmetric else rows("weight_zero_point", per_word)
        if zero is not None and (first % per_word or (last % per_word and last != shape[0])):
            raise ValueError(f"rows {first}:{last} cut a word of zero points")
        return dequantize_integer(rows("weight_packed"), rows("weight_scale"), zero, bits=scheme.bits)
    if scheme.name == "nvfp4a16":
        divisor = float(whole("weight_global_scale").reshape(-1)[0])
        return dequantize_nvfp4(rows("weight_packed"), rows("weight_scale"), global_scale=divisor)
    if scheme.name == "fp8_block":
        if first % FP8_BLOCK:
            raise ValueError(f"row {first} is inside a block")
        return dequantize_fp8_block(rows("weight"), rows("weight_scale", FP8_BLOCK))
    scale = whole("weight_scale").reshape(1, 1) if module.scheme.per_tensor else rows("weight_scale").reshape(-1, 1)
    return dequantize_fp8_channel(rows("weight"), scale.to(torch.float32))
