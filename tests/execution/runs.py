"""Quantizing in this process and in others, and the checkpoints that the execution tests do it to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparkquant.layers import LayerClass
from sparkquant.recipe_files import load_recipe
from tests.checkpoints import RawTensors

BUILDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "next": ("qwen3_next", {}),
    "vision": ("qwen3_5", {"float32_state": True}),
    "text": ("qwen3_5_text", {"shards": 1}),
    "moe": ("qwen3_5_moe", {}),
    "tied": ("qwen3_5", {"tied": True, "shards": 3}),
}
"""One checkpoint per kind: experts one by one, vision and float32 state, text alone, fused experts, tied head."""

Checkpoints = Callable[..., Path]


def source_of(kind: str, checkpoints: Checkpoints) -> Path:
    """The folder of a kind of checkpoint."""
    model_type, options = BUILDS[kind]
    return checkpoints(model_type, **options)


def in_a_child(
    code: str, *arguments: object, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python code with warnings as errors; `sys.argv[1:]` holds the arguments."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def set_values(tensors: RawTensors, name: str, index: int, raw: bytes) -> None:
    """Overwrite the element at a flat index by its stored bytes."""
    dtype, shape, data = tensors[name]
    at = index * len(raw)
    tensors[name] = (dtype, shape, data[:at] + raw + data[at + len(raw) :])


def quantizes_a_tied_head(kind: str, recipe: str) -> bool:
    """Whether a recipe wants a scheme for the lm_head that a kind of checkpoint does not have."""
    return kind == "tied" and load_recipe(recipe).schemes.get(LayerClass.LM_HEAD) is not None
