"""Values of GPTQ and AWQ modules, whose codes, zero points and scales are stored [K, N]: some rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkquant.checkpoint import TensorHeader
from sparkquant.formats.storage import Storage
from sparkquant.formats.stored import StoredModule, StoredScheme
from sparkquant.verification.payload import Floats, Payload

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word, from its low end, of each of the eight columns."""


INPUTS_AT_ONCE = 512


def _along_outputs(packed: NDArray[Any], bits: int, storage: Storage) -> NDArray[Any]:
    """[R, N / per_word] words -> [R, N] codes."""
    places = AWQ_PLACES if storage is Storage.AWQ else range(32 // bits)
    shifts = np.array([bits * place for place in places], dtype=np.uint32)
    spread = (packed.astype(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return spread.reshape(len(packed), -1)


def loses_columns(payload: Payload, module: StoredModule, scheme: StoredScheme, scales: Floats, first: int) -> bool:
    """Whether some zero scale of the groups from `first` on belongs to codes that are not its zero point."""
    qweight, qzeros = module.tensors.get("qweight"), module.tensors.get("qzeros")
    shape = scheme.shape_of(module.tensors)
    if qweight is None or qzeros is None or shape is None or len(qzeros.shape) != 2 or "g_idx" in module.tensors:
        return True
    bits, storage, size = scheme.scheme.bits, scheme.storage, scheme.scheme.group_size
    size = shape[1] if size == -1 else size
    zeros = _along_outputs(payload.codes(qzeros, first, first + len(scales)), bits, storage)
    zeros = zeros + (storage is Storage.GPTQ)
    if zeros.shape != scales.shape:
        return True
    for group in np.flatnonzero((scales == 0).any(axis=1)):
        start, end = (first + int(group)) * size, min((first + int(group) + 1) * size, shape[1])
        for at in range(start, end, INPUTS_AT_ONCE):
            codes = _codes(payload, qweight, bits, storage, at, min(at + INPUTS_AT_ONCE, end))
            if bool(((codes != zeros[group]) & (scales[group] == 0)).any()):
                return True
    return False


def _codes(payload: Payload, qweight: TensorHeader, bits: int, storage: Storage, first: int, last: int) -> NDArray[Any]:
    """Codes of some inputs: [last - first, N]."""
    if storage is Storage.AWQ:
        return _along_outputs(payload.codes(qweight, first, last), bits, storage)
    per_word = 32 // bits
    start = first // per_word
    packed = payload.codes(qweight, start, -(-last // per_word)).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    spread = ((packed[:, None, :] >> shifts[:, None]) & np.uint32(2**bits - 1)).reshape(-1, packed.shape[1])
    return spread[first - start * per_word :][: last - first]


def plain_order(payload: Payload, module: StoredModule, scheme: StoredScheme) -> bool:
    """Whether the stored g_idx, if there is one, is input / group size."""
    header, shape = module.tensors.get("g_idx"), scheme.shape_of(module.tensors)
    if header is None or shape is None or header.dtype not in ("I32", "I64") or header.shape != (shape[1],):
        return header is None or shape is None
    size = shape[1] if scheme.scheme.group_size == -1 else scheme.scheme.group_size
    index = payload.codes(header).reshape(-1)
    return bool((index == np.arange(shape[1]) // size).all())
