"""Published models as formulas: configs, totals, and header-only checkpoints (true headers, sparse data).

A header-only checkpoint takes a few hundred kilobytes on disk whatever the model's size; `plan` cannot tell it apart.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.data.shapes import Shapes, tensor_shapes

TOWER = {
    "model_type": "qwen3_5_vision", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
    "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip

QWEN3_5_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text", "dtype": "bfloat16", "vocab_size": 248320, "hidden_size": 5120,
        "intermediate_size": 17408, "num_hidden_layers": 64, "full_attention_interval": 4, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "attn_output_gate": True, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": False,
    },
    "vision_config": {**TOWER, "out_hidden_size": 5120},
}  # fmt: skip
QWEN3_5_27B_TENSORS = 1199
QWEN3_5_27B_PARAMETERS = 27_781_427_952
QWEN3_5_27B_BYTES = 55_562_855_904

QWEN3_5_35B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text", "dtype": "bfloat16", "vocab_size": 248320, "hidden_size": 2048,
        "num_hidden_layers": 40, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": False,
    },
    "vision_config": {**TOWER, "out_hidden_size": 2048},
}  # fmt: skip
QWEN3_5_35B_A3B_PARAMETERS = 35_951_822_704
QWEN3_5_35B_A3B_DRAFT_HEAD = 844_640_768

QWEN3_NEXT_80B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next", "dtype": "bfloat16", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 48, "full_attention_interval": 4, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_NEXT_80B_A3B_DECODER = 79_674_391_296
"""Without the draft head: what the model class instantiates."""


def qwen3_5_27b_shapes() -> Shapes:
    """The 1,199 tensors of Qwen3.5-27B (the same schema in 3.6 and 3.8)."""
    return tensor_shapes(QWEN3_5_27B)


def write_headers(
    folder: Path, config: Mapping[str, Any], shapes: Shapes, *, shards: int = 1, dtype: str = "BF16"
) -> Path:
    """A checkpoint with true headers and an index whose data are holes: full size to `stat`, almost nothing on disk."""
    width = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    folder.mkdir(parents=True, exist_ok=True)
    names = list(shapes)
    step = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        shard = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in names[number * step : (number + 1) * step]:
            size = width * math.prod(shapes[name])
            header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [position, position + size]}
            position += size
            weight_map[name] = shard
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / shard).open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + position)
    total = width * sum(math.prod(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder
