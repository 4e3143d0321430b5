"""Stored tensors back to float32, by the rules of `sparkquant.numerics`; the one part of reading that needs torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError
from sparkquant.formats.storage import Storage, scale_suffix
from sparkquant.formats.stored import StoredModule
from sparkquant.numerics.fp8 import dequantize_fp8_block, dequantize_fp8_channel
from sparkquant.numerics.integer import dequantize_integer
from sparkquant.numerics.nvfp4 import dequantize_nvfp4
from sparkquant.numerics.pack import unpack_nibbles
from sparkquant.numerics.rounding import e2m1_value
from sparkquant.reading import ShardReader
from sparkquant.schemes import FP8_BLOCK, NVFP4_BLOCK

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
        except KeyError as error:
            raise CheckpointError(f"{module.name}.{error.args[0]} is not stored", hint=_HINT) from None
        except (ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(f"{module.name}: its tensors do not fit its scheme: {error}", hint=_HINT) from None


def _rows(reader: ShardReader, module: StoredModule, first: int, last: int | None) -> Tensor:
    assert module.scheme is not None
    scheme, storage = module.scheme.scheme, module.scheme.storage
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

    if storage.by_columns:
        return _by_columns(module, whole, first, last)
    if scheme.is_integer:
        per_word = 32 // scheme.bits
        zero = None if scheme.symmetric else rows("weight_zero_point", per_word)
        if zero is not None and (first % per_word or (last % per_word and last != shape[0])):
            raise ValueError(f"rows {first}:{last} cut a word of zero points")
        return dequantize_integer(rows("weight_packed"), rows("weight_scale"), zero, bits=scheme.bits)
    if scheme.name == "nvfp4a16":
        if storage is Storage.MODELOPT:
            return _nvfp4_times(rows("weight"), rows("weight_scale"), whole("weight_scale_2"))
        divisor = float(whole("weight_global_scale").reshape(-1)[0])
        return dequantize_nvfp4(rows("weight_packed"), rows("weight_scale"), global_scale=divisor)
    if scheme.name == "fp8_block":
        if first % FP8_BLOCK:
            raise ValueError(f"row {first} is inside a block")
        return dequantize_fp8_block(rows("weight"), rows(scale_suffix(scheme, storage), FP8_BLOCK))
    scale = whole("weight_scale").reshape(1, 1) if module.scheme.per_tensor else rows("weight_scale").reshape(-1, 1)
    return dequantize_fp8_channel(rows("weight"), scale.to(torch.float32))


def _nvfp4_times(packed: Tensor, scale: Tensor, multiplier: Tensor) -> Tensor:
    """ModelOpt's NVFP4: the global scale is a multiplier, not a divisor."""
    if multiplier.numel() != 1:
        raise ValueError(f"weight_scale_2 has {multiplier.numel()} values")
    values = torch.unflatten(e2m1_value(unpack_nibbles(packed)), -1, (-1, NVFP4_BLOCK))
    return (values * (scale.float() * multiplier.float().reshape(())).unsqueeze(-1)).flatten(-2)


AWQ_SHIFTS = tuple(4 * position for position in (0, 4, 1, 5, 2, 6, 3, 7))
"""Where the eight columns of a word are, in bits from its low end."""


def _by_columns(module: StoredModule, whole: Callable[[str], Tensor], first: int, last: int) -> Tensor:
    """GPTQ and AWQ: everything is stored [K, N], zero points with it."""
    assert module.scheme is not None
    bits, storage = module.scheme.scheme.bits, module.scheme.storage
    per_word = 32 // bits
    shifts = torch.tensor(AWQ_SHIFTS if storage is Storage.AWQ else range(0, 32, bits), dtype=torch.int32)
    mask = 2**bits - 1
    words = slice(first // per_word, -(-last // per_word))
    part = slice(first - words.start * per_word, last - words.start * per_word)

    def outputs(packed: Tensor) -> Tensor:
        """Values that are packed along the outputs: [R, N / per_word] -> [R, last - first]."""
        values: Tensor = (packed[:, words].unsqueeze(-1) >> shifts) & mask
        return values.flatten(-2)[:, part]

    qweight, scales = whole("qweight"), whole("scales")[:, first:last].float()
    zeros = outputs(whole("qzeros")) + (1 if storage is Storage.GPTQ else 0)
    if storage is Storage.AWQ:
        codes = outputs(qweight)
    else:
        codes = ((qweight[:, first:last].unsqueeze(1) >> shifts.view(1, -1, 1)) & mask).flatten(0, 1)
    group = _groups(module, len(codes), len(scales), whole)
    weight: Tensor = (codes - zeros[group]).float() * scales[group]
    return weight.t().contiguous()


def _groups(module: StoredModule, inputs: int, groups: int, whole: Callable[[str], Tensor]) -> Tensor:
    """The group of every input: as `g_idx` says, or in order."""
    assert module.scheme is not None
    size = module.scheme.scheme.group_size
    size = inputs if size == -1 else size
    index: Tensor = whole("g_idx").long() if "g_idx" in module.tensors else torch.arange(inputs) // size
    if index.shape != (inputs,) or int(index.min()) < 0 or int(index.max()) >= groups:
        raise ValueError(f"its {inputs} inputs do not fit {groups} groups of {size}")
    return index
