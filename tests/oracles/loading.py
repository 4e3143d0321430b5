"""Exports as transformers and compressed-tensors read them: whole models with their weights decompressed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what transformers and compressed-tensors say about their own ways of loading."""
    with warnings.catch_warnings():
        # Said whenever a config asks for decompression, which is how these tests look at weights.
        warnings.filterwarnings("ignore", "You passed `quantization_config` or equivalent", UserWarning)
        yield


def load(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a folder and transformers' loading report; quantized weights arrive decompressed."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = json.loads((folder / "config.json").read_text())
    options = {}
    if "quantization_config" in config:
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model_class = getattr(transformers, config["architectures"][0])
    with _quiet():
        model, report = model_class.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    return model.eval(), report


def weights_alone(model: nn.Module) -> nn.Module:
    """The same model without the rounding of activations, which FP8 schemes ask for: what peers' numbers are about."""
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_enabled = False
    return model


def faults(report: dict[str, Any]) -> dict[str, Any]:
    """What a loading report complains about, the draft head aside: transformers has no class for it."""
    unexpected = {name for name in report["unexpected_keys"] if not name.startswith("mtp.")}
    found = {**report, "unexpected_keys": unexpected}
    return {kind: names for kind, names in found.items() if names}
