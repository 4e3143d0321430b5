"""Read a quantized checkpoint of any producer: which module is stored how, and what its weights are.

A producer is one file here that defines `QUANT_METHODS` (values of `quant_method` in config.json),
`declared(checkpoint, block) -> Declaration` (what the config says, its faults as data) and
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
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparkquant.checkpoint import Checkpoint, read_json
from sparkquant.errors import UnsupportedFormat
from sparkquant.formats.declaration import Declaration
from sparkquant.formats.stored import StoredModule, StoredScheme, split_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Declaration", "StoredModule", "StoredScheme", "UnsupportedFormat", "declared", "dequantize", "quant_methods",
    "quantization_block", "quantization_of", "side_block", "split_name", "stored_modules",
]  # fmt: skip


NOT_READERS = ("declaration", "dequantization", "storage", "stored")
"""Modules here that are not searched for readers: the second one needs torch."""


@cache
def _readers() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name in NOT_READERS:
            continue
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


def side_block(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The block that ModelOpt's hf_quant_config.json stands for; None without that file, or with a link in its place.

    Raises CheckpointError when it is no JSON object.
    """
    from sparkquant.formats.modelopt import SIDE_FILE, block_of

    path = checkpoint.path / SIDE_FILE
    if not path.is_file() or checkpoint.path.resolve() not in (*path.resolve().parents, *_snapshot_roots(path)):
        return None
    return block_of(read_json(path))


def _snapshot_roots(path: Path) -> tuple[Path, ...]:
    """The folder itself for a link of the hub cache to its own blobs."""
    folder = path.parent.resolve()
    blobs = folder.parent.parent / "blobs"
    return (folder,) if folder.parent.name == "snapshots" and blobs in path.resolve().parents else ()


def quantization_of(checkpoint: Checkpoint) -> Any:
    """The block of config.json, else the one of hf_quant_config.json; None when nothing is declared."""
    block = quantization_block(checkpoint.config)
    return side_block(checkpoint) if block is None else block


def reader_for(block: Any, *, source: str = "config.json") -> ModuleType | None:
    """The reader of a block's `quant_method`; None when nothing is declared. Raises UnsupportedFormat."""
    if block is None:
        return None
    method = block.get("quant_method") if isinstance(block, Mapping) else None
    reader = _readers().get(method) if isinstance(method, str) else None
    if reader is None:
        raise UnsupportedFormat(
            f"{source}: quant_method {str(method)[:80]!r} cannot be read", hint=f"known: {', '.join(quant_methods())}"
        )
    return reader


def declared(checkpoint: Checkpoint) -> Declaration | None:
    """What the quantization config says, its faults included; None when there is none. Raises UnsupportedFormat."""
    block = quantization_of(checkpoint)
    reader = reader_for(block, source=str(checkpoint.path / "config.json"))
    if reader is None:
        return None
    said: Declaration = reader.declared(checkpoint, block)
    return said


def stored_modules(checkpoint: Checkpoint) -> Mapping[str, StoredModule]:
    """Every module with its stored tensors; `scheme` is None where it holds plain weights."""
    reader = reader_for(quantization_of(checkpoint), source=str(checkpoint.path / "config.json"))
    if reader is None:
        from sparkquant.formats.stored import plain_modules

        return plain_modules(checkpoint)
    modules: Mapping[str, StoredModule] = reader.modules(checkpoint)
    return modules


def dequantize(checkpoint: Checkpoint, module: StoredModule, *, first: int = 0, last: int | None = None) -> Tensor:
    """The float32 weight of a module, or its rows `first:last` (multiples of 128 for block scales)."""
    from sparkquant.formats.dequantization import dequantized_rows

    return dequantized_rows(checkpoint, module, first, last)
