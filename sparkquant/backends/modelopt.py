"""ModelOpt: its scales for exactly the modules of the plan, written in the conventions of compressed-tensors.

ModelOpt keeps a global scale as a multiplier where compressed-tensors keeps a divisor, and its FP8 default is one
scale for the matrix with a stored input scale. Here FP8 has a scale for every row (or block) as the plan says, and
inputs are left to the engine, which scales them by token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sparkquant.backends.native import stored_tensors
from sparkquant.backends.work import Result, Target, Work
from sparkquant.numerics.fp8 import Fp8Weights
from sparkquant.numerics.nvfp4 import Nvfp4Weights
from sparkquant.schemes import FP8_BLOCK, NVFP4_BLOCK, Scheme

_EXPERT = re.compile(r"(.*\.experts\.)\d+(\..*)")

FORMATS: dict[str, dict[str, Any]] = {
    "nvfp4a16": {"num_bits": (2, 1), "block_sizes": {-1: NVFP4_BLOCK, "type": "dynamic", "scale_bits": (4, 3)}},
    "fp8": {"num_bits": (4, 3), "axis": 0},
    "fp8_block": {"num_bits": (4, 3), "block_sizes": {-1: FP8_BLOCK, -2: FP8_BLOCK}},
}
"""Weight quantizers by scheme."""

FP8_AS_PLANNED = (
    "scales by row or block, inputs scaled by the engine; ModelOpt's default is one scale and a fixed input scale"
)


def quantize(work: Work) -> Result:
    """Calibrate the weight quantizers of the plan; the weights alone are looked at."""
    import modelopt.torch.quantization as mtq

    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]  # the last match wins
    entries += [{"quantizer_name": name, "cfg": FORMATS[scheme.name]} for name, scheme in _quantizers(work).items()]
    with torch.no_grad():
        settings = {"quant_cfg": entries, "algorithm": work.options["algorithm"]}
        model = mtq.quantize(work.model.to(work.device), settings, None)
    found = {name: module for name, module in model.named_modules() if _is_quantized(module)}
    _share_global_scales(work, found)
    eight = any(target.scheme.name != "nvfp4a16" for target in work.targets)
    return Result(frozenset(found), _stored(work, found), {"fp8": FP8_AS_PLANNED} if eight else {})


def _quantizers(work: Work) -> dict[str, Scheme]:
    """Names of quantizers, with a wildcard over the experts of a layer, which always have one scheme."""
    found = {}
    for target in work.targets:
        match = _EXPERT.fullmatch(target.live)
        name = target.live if match is None else f"{match[1]}*{match[2]}"
        found[f"{name}.weight_quantizer"] = target.scheme
    return found


def _is_quantized(module: nn.Module) -> bool:
    quantizer = getattr(module, "weight_quantizer", None)
    return quantizer is not None and bool(quantizer.is_enabled)


def _share_global_scales(work: Work, found: dict[str, nn.Module]) -> None:
    """Its exporter knows the fused groups of some classes; here every group of the plan takes its largest magnitude."""
    for group in work.by_scale_group().values():
        quantizers: list[Any] = [found[t.live].weight_quantizer for t in group if t.live in found]
        if group[0].scheme.name == "nvfp4a16" and quantizers:
            peak = torch.stack([quantizer.amax.float().max() for quantizer in quantizers]).max()
            for quantizer in quantizers:
                quantizer.amax = peak.to(quantizer.amax.device).reshape(quantizer.amax.shape)


def _stored(work: Work, found: dict[str, nn.Module]) -> Iterator[tuple[str, str, Tensor]]:
    for target in work.targets:
        module: Any = found.get(target.live)
        if module is None:
            continue
        with torch.no_grad():
            result, divisor = _encoded(module, target)
        for suffix, tensor in stored_tensors(target.scheme, result, module.weight.shape, divisor):
            yield target.module, suffix, tensor.cpu()


def _encoded(module: Any, target: Target) -> tuple[Nvfp4Weights | Fp8Weights, float | None]:
    from modelopt.torch.export.quant_utils import get_weight_scaling_factor, get_weight_scaling_factor_2
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight: Tensor = module.weight.detach()
    scale: Tensor = get_weight_scaling_factor(module)
    if target.scheme.name == "nvfp4a16":
        multiplier = get_weight_scaling_factor_2(module).float()
        codes = NVFP4QTensor.quantize(weight, NVFP4_BLOCK, scale, multiplier)[0]._quantized_data
        return Nvfp4Weights(codes, scale.to(torch.float8_e4m3fn)), float(1 / multiplier)
    # The scale is stored in BF16: codes are made for the stored one, with ModelOpt's range.
    scale = _grid(scale, weight.shape, target.scheme).to(torch.bfloat16)
    spread = scale.float()
    if target.scheme.name == "fp8_block":
        spread = spread.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        spread = spread[: weight.shape[0], : weight.shape[1]]
    values = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Fp8Weights(values, scale), None


def _grid(scale: Tensor, shape: torch.Size, scheme: Scheme) -> Tensor:
    """Scales [N, 1], or one for every block of 128 x 128."""
    rows, columns = (-(-size // FP8_BLOCK) for size in shape)
    return scale.float().reshape((rows, columns) if scheme.name == "fp8_block" else (shape[0], 1))
