"""Read a quantized checkpoint of any producer: which module is stored how, and what its weights are.

A producer is one file here that defines `QUANT_METHODS` (values of `quant_method` in config.json) and
`modules(checkpoint) -> Mapping[str, StoredModule]`. It is found by its presence; nothing else has to be edited.

    weights = stored_modules(checkpoint)
    weights["model.layers.0.mlp.up_proj"].scheme.label      # "w4a16 g128"
    dequantize(checkpoint, weights["model.layers.0.mlp.up_proj"])
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError
from sparkquant.formats.stored import StoredModule, StoredScheme, split_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "StoredModule", "StoredScheme", "UnsupportedFormat", "dequantize", "quant_methods", "quantization_block",
    "split_name", "stored_modules",
]  # fmt: skip


class UnsupportedFormat(CheckpointError):
    """A `quant_method` that no reader knows."""


@cache
def _readers() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for method in getattr(module, "QUANT_METHODS", ()):
            found[method] = module
    return found


def quant_methods() -> list[str]:
    """Every `quant_method` that can be read, sorted."""
    return sorted(_readers())


def quantization_block(config: Mapping[str, Any]) -> Any:
    """`quantization_config` where engines look for it: at the top, else in the text part; None when there is none."""
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    return config.get("quantization_config") or inner


def reader_for(config: Mapping[str, Any], *, source: str = "config.json") -> ModuleType | None:
    """The reader of a config's `quant_method`; None when nothing is declared. Raises UnsupportedFormat."""
    block = quantization_block(config)
    if block is None:
        return None
    method = block.get("quant_method") if isinstance(block, Mapping) else None
    reader = _readers().get(method) if isinstance(method, str) else None
    if reader is None:
        raise UnsupportedFormat(
            f"{source}: quant_method {str(method)[:80]!r} cannot be read", hint=f"known: {', '.join(quant_methods())}"
        )
    return reader


def stored_modules(checkpoint: Checkpoint) -> Mapping[str, StoredModule]:
    """Every module with its stored tensors; `scheme` is None where it holds plain weights."""
    reader = reader_for(checkpoint.config, source=str(checkpoint.path / "config.json"))
    if reader is None:
        from sparkquant.formats.stored import plain_modules

        return plain_modules(checkpoint)
    modules: Mapping[str, StoredModule] = reader.modules(checkpoint)
    return modules


def dequantize(checkpoint: Checkpoint, module: StoredModule, *, first: int = 0, last: int | None = None) -> Tensor:
    """The float32 weight of a module, or its rows `first:last` (multiples of 128 for block scales)."""
    from sparkquant.formats.dequantization import dequantized_rows

    return dequantized_rows(checkpoint, module, first, last)
