"""Quantization arithmetic: tensors in, tensors as they lie on disk out. No files, no config.

Every ``quantize_*`` takes a contiguous [N, K] or [E, N, K] bfloat16, float16 or float32 tensor on
any device; round to nearest by default, the scale of least squared error with ``search=True``.
CPU tensors go through compiled kernels where numba works, everything else through plain torch;
both give the same bytes.

Names are resolved when first used: ``arrays``, ``limits`` and ``machine`` work without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkquant.numerics.fp8 import (
        Fp8Weights,
        dequantize_fp8_block,
        dequantize_fp8_channel,
        quantize_fp8_block,
        quantize_fp8_channel,
    )
    from sparkquant.numerics.integer import IntegerWeights, dequantize_integer, quantize_integer
    from sparkquant.numerics.limits import global_scale
    from sparkquant.numerics.machine import uses_kernels
    from sparkquant.numerics.magnitude import Absmax, absmax
    from sparkquant.numerics.nvfp4 import Nvfp4Weights, dequantize_nvfp4, quantize_nvfp4

_HOMES = {
    "Absmax": "magnitude",
    "Fp8Weights": "fp8",
    "IntegerWeights": "integer",
    "Nvfp4Weights": "nvfp4",
    "absmax": "magnitude",
    "dequantize_fp8_block": "fp8",
    "dequantize_fp8_channel": "fp8",
    "dequantize_integer": "integer",
    "dequantize_nvfp4": "nvfp4",
    "global_scale": "limits",
    "quantize_fp8_block": "fp8",
    "quantize_fp8_channel": "fp8",
    "quantize_integer": "integer",
    "quantize_nvfp4": "nvfp4",
    "uses_kernels": "machine",
}

__all__ = [
    "Absmax",
    "Fp8Weights",
    "IntegerWeights",
    "Nvfp4Weights",
    "absmax",
    "dequantize_fp8_block",
    "dequantize_fp8_channel",
    "dequantize_integer",
    "dequantize_nvfp4",
    "global_scale",
    "quantize_fp8_block",
    "quantize_fp8_channel",
    "quantize_integer",
    "quantize_nvfp4",
    "uses_kernels",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sparkquant.numerics' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sparkquant.numerics.{home}"), name)
    globals()[name] = value
    return value
