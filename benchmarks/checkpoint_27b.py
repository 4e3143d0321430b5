"""A checkpoint with the true layer shapes of the 27B: three delta-net layers and one attention layer, about 3 GB."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, VOCABULARY = 5120, 17408, 8192


def shapes() -> dict[str, list[int]]:
    """Names and shapes; the vocabulary is cut, since embeddings are only copied."""
    found: dict[str, list[int]] = {
        "model.language_model.embed_tokens.weight": [VOCABULARY, HIDDEN],
        "model.language_model.norm.weight": [HIDDEN],
        "lm_head.weight": [VOCABULARY, HIDDEN],
    }
    for layer in range(4):
        at = f"model.language_model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{norm}.weight"] = [HIDDEN]
        for name in ("gate_proj", "up_proj"):
            found[f"{at}mlp.{name}.weight"] = [INTERMEDIATE, HIDDEN]
        found[f"{at}mlp.down_proj.weight"] = [HIDDEN, INTERMEDIATE]
        if layer == 3:
            rows = {"q_proj": 12288, "k_proj": 1024, "v_proj": 1024}
            found |= {f"{at}self_attn.{name}.weight": [n, HIDDEN] for name, n in rows.items()}
            found[f"{at}self_attn.o_proj.weight"] = [HIDDEN, 6144]
            found |= {f"{at}self_attn.{name}.weight": [256] for name in ("q_norm", "k_norm")}
            continue
        rows = {"in_proj_qkv": 10240, "in_proj_z": 6144, "in_proj_b": 48, "in_proj_a": 48}
        found |= {f"{at}linear_attn.{name}.weight": [n, HIDDEN] for name, n in rows.items()}
        found[f"{at}linear_attn.out_proj.weight"] = [HIDDEN, 6144]
        found[f"{at}linear_attn.conv1d.weight"] = [10240, 1, 4]
        found |= {f"{at}linear_attn.{name}": [48] for name in ("A_log", "dt_bias")}
        found[f"{at}linear_attn.norm.weight"] = [128]
    return found


def build(folder: Path) -> int:
    """Write the checkpoint (once) and return its payload in bytes. Weights are normal with a few large columns."""
    marker = folder / "config.json"
    if not marker.exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(27)
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for index, (name, shape) in enumerate(sorted(shapes().items())):
            tensor = torch.randn(shape, generator=generator) * 0.02
            if len(shape) == 2:
                tensor[:, ::97] *= 4
            groups.setdefault(f"model-{1 + index * 4 // len(shapes()):05d}-of-00004.safetensors", {})[name] = (
                tensor.bfloat16()
            )
        weight_map = {}
        for shard, tensors in groups.items():
            save_file(tensors, folder / shard, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        marker.write_text(json.dumps(_config(), indent=1))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _config() -> dict[str, object]:
    text = {
        "model_type": "qwen3_5_text", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 4,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": VOCABULARY,
        "dtype": "bfloat16", "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
    }  # fmt: skip
    return {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}


if __name__ == "__main__":
    build(Path(sys.argv[1]))
