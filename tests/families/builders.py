"""Small checkpoints of the families in `configs`, written without torch: same case, same bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests import checkpoints
from tests.checkpoints import RawTensors, write_json, write_shards
from tests.families.configs import CASES
from tests.families.shapes import shapes_of

INTEGERS = {
    # What the library computes for the small config: a wrong table would point outside the embedding.
    "layer_multipliers": (5, 7, 11),
    "ngram_heads_offsets": (0, 67, 138, 211),
    "ngram_heads_vocab_sizes": (67, 71, 73, 79),
}
FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")


def build(
    case: str,
    folder: Path,
    *,
    shards: int = 2,
    dtype: str = "BF16",
    side_files: bool = False,
    change: Callable[[dict[str, Any], RawTensors], None] | None = None,
) -> Path:
    """Write the checkpoint of a case and return its folder."""
    config: dict[str, Any] = json.loads(json.dumps(CASES[case]))
    tensors: RawTensors = {}
    for name, shape in shapes_of(config).items():
        leaf = name.rpartition(".")[2]
        if leaf in INTEGERS:
            tensors[name] = ("I64", shape, np.asarray(INTEGERS[leaf], "<i8").tobytes())
        else:
            tensors[name] = (dtype, shape, checkpoints._encode(_values(name, shape), dtype))
    if change is not None:
        change(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_shards(folder, tensors, shards=shards)
    if side_files:
        checkpoints._write_side_files(folder, vision="vision_config" in config)
    return folder


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Values by role, seeded by the name alone."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("A_log"):
        return np.log(1 + 15 * random.random(shape, dtype=np.float32))
    normal = random.standard_normal(shape, dtype=np.float32)
    if len(shape) < 2:
        is_norm = ("norm" in name and name.endswith(".weight")) or name.endswith(("layer_scalar", ".D"))
        return np.float32(1.0 if is_norm else 0.0) + np.float32(0.02) * normal
    return normal / np.float32(shape[-1] ** 0.5)
