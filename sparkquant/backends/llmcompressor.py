"""llm-compressor: its modifiers on exactly the modules of the plan, its compressors for what is stored.

What it would do by itself is replaced: experts are made Linears before names are resolved, NVFP4 global scales are
shared by the plan's groups (its own list knows q/k/v and gate/up, not in_proj_qkv and in_proj_z), and norms that store
their weight less one stay as they are (it would round 1 + w to BF16 and take the 1 off again).
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparkquant.backends.work import Result, Target, Work
from sparkquant.schemes import FP8_BLOCK, NVFP4_BLOCK, Scheme

_EXPERT = re.compile(r"(.*\.experts\.)\d+(\..*)")


def quantize(work: Work) -> Result:
    """Run the modifier of the method over the rows, block by block."""
    from compressed_tensors.quantization import QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from torch.utils.data import DataLoader

    linearize_moe(work.model)
    observer = "imatrix_mse" if work.options["modifier"] == "imatrix" else None
    groups = {
        f"group_{index}": QuantizationScheme(targets=patterns(targets), **_arguments(targets[0].scheme, observer))
        for index, targets in enumerate(work.by_scheme().values())
    }
    _share_global_scales(work)
    _leave_norms()
    model: Any = work.model
    model.config._name_or_path = work.folder  # it reads the config of a model that it has in memory already
    rows = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row)).long()} for row in work.rows]
    modifiers = _modifiers(work, groups)
    oneshot(
        model=model,
        recipe=modifiers,
        processor=_NoProcessor(),
        pipeline="sequential",
        dataset=DataLoader(rows, batch_size=None),  # type: ignore[arg-type]
    )
    names = [name for name, module in work.model.named_modules() if _is_quantized(module)]
    unsolved = sorted(getattr(modifiers[-1], "_rtn_fallback_module_names", ()))
    notes = {"rounded to nearest, their inputs being degenerate": unsolved} if unsolved else {}
    return Result(frozenset(names), _stored(work, frozenset(names)), notes)


class _NoProcessor:
    """Stands in for a tokenizer: rows are ids already, and its absence would be an error after the work."""


def patterns(targets: Sequence[Target]) -> list[str]:
    """Exact names, but for experts: one pattern for all of a layer, as thousands of names take hours to match."""
    found: dict[str, None] = {}
    for target in targets:
        match = _EXPERT.fullmatch(target.live)
        one = target.live if match is None else rf"re:{re.escape(match[1])}\d+{re.escape(match[2])}$"
        found[one] = None
    return list(found)


def _arguments(scheme: Scheme, observer: str | None) -> dict[str, Any]:
    """A scheme in the words of compressed-tensors."""
    from compressed_tensors.quantization import QuantizationArgs

    observed = {"observer": observer} if observer else {}
    if scheme.is_integer:
        width = {"strategy": "group", "group_size": scheme.group_size}
        width = {"strategy": "channel"} if scheme.group_size == -1 else width
        fields = {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric, **width}
        return {"weights": QuantizationArgs(**fields, **observed)}
    base = {"type": "float", "symmetric": True}
    if scheme.name == "nvfp4a16":
        scales = {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
        fields = {"num_bits": 4, **base, "strategy": "tensor_group", "group_size": NVFP4_BLOCK, **scales}
        return {"weights": QuantizationArgs(**fields, **observed)}
    inputs = {"num_bits": 8, **base, "dynamic": True, "observer": None}
    if scheme.name == "fp8":
        weights = QuantizationArgs(num_bits=8, **base, strategy="channel", **observed)
        return {"weights": weights, "input_activations": QuantizationArgs(**inputs, strategy="token")}
    blocks = {"strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]}
    weights = QuantizationArgs(num_bits=8, **base, **blocks)
    return {
        "weights": weights,
        "input_activations": QuantizationArgs(**inputs, strategy="group", group_size=FP8_BLOCK),
    }


def _modifiers(work: Work, groups: dict[str, Any]) -> list[Any]:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    if work.options["modifier"] == "gptq":
        # Only a static order is readable by every engine version.
        options = {"dampening_frac": work.options["dampening"], "actorder": "static"}
        return [GPTQModifier(config_groups=groups, ignore=[], **options)]
    return [QuantizationModifier(config_groups=groups, ignore=[])]


def _share_global_scales(work: Work) -> None:
    """Link the observers of the plan's scale groups instead of those of the library's list of names."""
    from llmcompressor.modifiers.quantization.quantization import mixin
    from llmcompressor.observers.fusion import FusionHandler

    groups = [group for group in work.by_scale_group().values() if group[0].scheme.name == "nvfp4a16"]

    def link(model: nn.Module) -> None:
        for group in groups:
            modules = [model.get_submodule(target.live) for target in group]
            FusionHandler.fuse([(module.weight_observer, module) for module in modules])

    mixin.fuse_weight_observers = link


def _leave_norms() -> None:
    """Only AWQ and SmoothQuant need norms in another form, and they are not offered."""
    entrypoint: Any = importlib.import_module("llmcompressor.entrypoints.oneshot")
    entrypoint.norm_calibration_context = lambda model: contextlib.nullcontext()  # noqa: ARG005


def _is_quantized(module: nn.Module) -> bool:
    scheme = getattr(module, "quantization_scheme", None)
    return scheme is not None and scheme.weights is not None and hasattr(module, "weight_scale")


def _stored(work: Work, names: frozenset[str]) -> Iterator[tuple[str, str, Tensor]]:
    from compressed_tensors.compressors import compress_module

    for target in work.targets:
        if target.live not in names:
            continue
        module: Any = work.model.get_submodule(target.live)
        shape = tuple(module.weight.shape)
        compress_module(module)
        state = module.state_dict()
        for output in target.scheme.outputs(shape):
            yield target.module, output.name, state[output.name].detach().cpu().reshape(output.shape)
        work.model.set_submodule(target.live, nn.Identity())  # its memory is not needed any more
