"""Do a result and a source belong together? Numbers of two different models would look like a bad quantization."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparkquant.checkpoint import Checkpoint, read_json
from sparkquant.errors import CheckpointError, Problem
from sparkquant.formats import dequantize, split_name, stored_modules
from sparkquant.layers import LayerClass
from sparkquant.layouts import layout_for

HINT = "pass the 16-bit checkpoint that the result was made from as source"

_STRUCTURE = re.compile(r"head_dim|layer_types|num_(?!nextn)\w+|\w+_size|\w+_dim")
"""Keys of the text config that make another model; a result that lost its draft head may say so."""

SAMPLE = 1024
"""Rows of the embedding that are compared; a multiple of every block."""

ANOTHER, TUNED = 0.5, 0.004
"""Relative difference of the embeddings: of another model, and beyond what a change of dtype explains. Four bits cost
about 0.1."""

_APART = frozenset({LayerClass.MTP, LayerClass.VISION, LayerClass.AUDIO})


def demand_pair(result: Checkpoint, source: Checkpoint) -> tuple[str, ...]:
    """What speaks against the pair, as notes; CheckpointError when it cannot be one."""
    mine, theirs = result.text_config, source.text_config
    keys = sorted(key for key in mine.keys() & theirs.keys() if _STRUCTURE.fullmatch(key) and mine[key] != theirs[key])
    if keys:
        problems = [
            Problem(f"config.json: {key}", f"{mine[key]} in the result, {theirs[key]} in the source") for key in keys
        ]
        raise CheckpointError("result and source are different models", hint=HINT, problems=problems)
    return (*_embedding_doubts(result, source), *_overlaid(result))


def _embedding_doubts(result: Checkpoint, source: Checkpoint) -> tuple[str, ...]:
    """Quantization leaves the embedding alone, or nearly so: it shows whose weights these are."""
    a, b = _embedding(source), _embedding(result)
    if a is None or b is None:
        return ()
    if a[0].shape != b[0].shape:
        shapes = f"{list(b[0].shape)} in the result, {list(a[0].shape)} in the source"
        raise CheckpointError(f"result and source are different models: embeddings {shapes}", hint=HINT)
    norm = float(a[0].norm())
    difference = float((b[0] - a[0]).norm()) / norm if norm else 0.0
    if not difference <= ANOTHER:
        raise CheckpointError(
            f"result and source are different models: their embeddings differ by {difference:.0%}", hint=HINT
        )
    if difference > TUNED and not b[1]:
        return (f"the embeddings differ by {difference:.1%}: was the result made from this source?",)
    return ()


def _embedding(checkpoint: Checkpoint) -> tuple[Tensor, bool] | None:
    """(first rows, whether they are quantized); None where there is none."""
    layout = layout_for(checkpoint.config, source=str(checkpoint.path))
    for name, module in stored_modules(checkpoint).items():
        placement = layout.place(f"{name}.weight")
        if placement is None or placement.layer_class is not LayerClass.EMBED or not module.shape:
            continue
        return dequantize(checkpoint, module, last=min(SAMPLE, module.shape[0])), module.is_quantized
    return None


def _overlaid(result: Checkpoint) -> tuple[str, ...]:
    """A live model was laid over the source: its changes count as differences too."""
    path = result.path / "sparkquant" / "plan.json"
    origin = read_json(path).get("source") if path.is_file() else None
    names = origin.get("overlaid") if isinstance(origin, Mapping) else None
    if not names:
        return ()
    return (f"the result was made from a live model: its {len(names)} changed tensors count as differences",)


def block_bytes(*checkpoints: Checkpoint) -> dict[int | None, int]:
    """Stored bytes of every decoder block, all checkpoints together."""
    sizes: dict[int | None, int] = {}
    for checkpoint in checkpoints:
        layout = layout_for(checkpoint.config)
        for name, header in checkpoint.tensors.items():
            module, suffix = split_name(name)
            placement: Any = layout.place(f"{module}.weight" if suffix else name)
            if placement is not None and placement.layer_class not in _APART:
                sizes[placement.layer] = sizes.get(placement.layer, 0) + header.bytes
    return sizes
