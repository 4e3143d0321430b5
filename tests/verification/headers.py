"""A result of full size by its headers alone: what `quantize` would write, with holes for data."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from sparkquant.checkpoint import Checkpoint
from sparkquant.hfconfig import result_config
from sparkquant.planning import make_plan
from sparkquant.recipe import Recipe
from sparkquant.recipe_files import load_recipe
from sparkquant.schemes import DTYPE_BYTES


def write_result(source: Path, recipe: str | Recipe, out: Path) -> Path:
    """Write the planned tensors of `source` under `recipe` as sparse files."""
    checkpoint = Checkpoint.open(source)
    plan = make_plan(checkpoint, load_recipe(recipe))
    out.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for shard in plan.shards:
        header: dict[str, object] = {}
        position = 0
        for name in shard.tensors:
            for tensor in plan.decisions[name].stored():
                size = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
                entry = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
                header[tensor.name] = {**entry, "data_offsets": [position, position + size]}
                position += size
                weight_map[tensor.name] = shard.name
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (out / shard.name).open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + position)
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (out / "config.json").write_text(result_config(checkpoint.config, plan))
    (out / "sparkquant").mkdir()
    (out / "sparkquant" / "plan.json").write_text(plan.to_json())
    return out
