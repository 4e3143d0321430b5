"""Quantization arithmetic: tensors in, tensors as they lie on disk out. No files, no config.

Every ``quantize_*`` takes a contiguous [N, K] or [E, N, K] bfloat16, float16 or float32 tensor on
any device; round to nearest by default, the scale of least squared error with ``search=True``.
CPU tensors go through compiled kernels where numba works, everything else through plain torch;
both give the same bytes.
"""

from sparkquant.numerics.absmax import Absmax, absmax
from sparkquant.numerics.dispatch import uses_kernels
from sparkquant.numerics.fp8 import (
    Fp8Weights,
    dequantize_fp8_block,
    dequantize_fp8_channel,
    quantize_fp8_block,
    quantize_fp8_channel,
)
from sparkquant.numerics.integer import IntegerWeights, dequantize_integer, quantize_integer
from sparkquant.numerics.nvfp4 import (
    Nvfp4Weights,
    dequantize_nvfp4,
    global_scale,
    quantize_nvfp4,
)

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
