"""Names and shapes of a checkpoint computed from its config, for the Qwen hybrid families.

The same formulas give the small checkpoints of the tests and the published sizes (27,781,427,952 parameters of the
27B), so a builder that drifts from the real layout breaks the totals in `published.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: Mapping[str, Any], *, fused_experts: bool | None = None) -> Shapes:
    """Every tensor of the file form of a config, draft head included when the config (or qwen3_next) has one.

    `fused_experts` chooses 3-D expert tensors; the default is what the family publishes in BF16.
    """
    text = config.get("text_config", config)
    family = str(config["model_type"]).removesuffix("_text")
    prefix = "model.language_model." if "text_config" in config else "model."
    fused = family == "qwen3_5_moe" if fused_experts is None else fused_experts
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (vocab, hidden), f"{prefix}norm.weight": (hidden,)}
    if not text.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    for index, kind in enumerate(layer_types(text)):
        at = f"{prefix}layers.{index}"
        shapes |= (
            delta_net(at, text, split=family != "qwen3_next") if kind == "linear_attention" else attention(at, text)
        )
        dense = not text.get("num_experts") or index in text.get("mlp_only_layers", ())
        shapes |= mlp(f"{at}.mlp", hidden, text["intermediate_size"]) if dense else moe(at, text, fused=fused)
        shapes |= block_norms(at, hidden)
    if "vision_config" in config:
        shapes |= vision(config["vision_config"])
    if text.get("mtp_num_hidden_layers"):
        shapes |= draft_head(text, fused=fused)
    return shapes


def parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Number of elements."""
    return sum(math.prod(shape) for shape in shapes.values())


def without(shapes: Shapes, *prefixes: str) -> Shapes:
    """The shapes whose names start with none of the prefixes."""
    return {name: shape for name, shape in shapes.items() if not name.startswith(prefixes)}


def layer_types(text: Mapping[str, Any]) -> Iterable[str]:
    """Kind of every decoder layer: listed, or every n-th is full attention."""
    every = text.get("full_attention_interval", 4)
    derived = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(text["num_hidden_layers"])]
    return text.get("layer_types") or derived


def delta_net(at: str, text: Mapping[str, Any], *, split: bool) -> Shapes:
    """A gated delta net: four input projections (Qwen3.5) or two row-interleaved ones (Qwen3-Next)."""
    hidden, key_heads, value_heads = text["hidden_size"], text["linear_num_key_heads"], text["linear_num_value_heads"]
    key, value = key_heads * text["linear_key_head_dim"], value_heads * text["linear_value_head_dim"]
    separate = {
        "in_proj_qkv.weight": (2 * key + value, hidden),
        "in_proj_z.weight": (value, hidden),
        "in_proj_b.weight": (value_heads, hidden),
        "in_proj_a.weight": (value_heads, hidden),
    }
    joined = {"in_proj_qkvz.weight": (2 * key + 2 * value, hidden), "in_proj_ba.weight": (2 * value_heads, hidden)}
    rest = {
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
        "conv1d.weight": (2 * key + value, 1, text["linear_conv_kernel_dim"]),
        "norm.weight": (text["linear_value_head_dim"],),
        "out_proj.weight": (hidden, value),
    }
    return {f"{at}.linear_attn.{name}": shape for name, shape in ((separate if split else joined) | rest).items()}


def attention(at: str, text: Mapping[str, Any]) -> Shapes:
    """Gated attention: q_proj holds query and output gate of every head."""
    hidden, width = text["hidden_size"], text["head_dim"]
    query, key = text["num_attention_heads"] * width, text["num_key_value_heads"] * width
    return {
        f"{at}.self_attn.q_proj.weight": (2 * query, hidden),
        f"{at}.self_attn.k_proj.weight": (key, hidden),
        f"{at}.self_attn.v_proj.weight": (key, hidden),
        f"{at}.self_attn.o_proj.weight": (hidden, query),
        f"{at}.self_attn.q_norm.weight": (width,),
        f"{at}.self_attn.k_norm.weight": (width,),
    }


def mlp(at: str, hidden: int, inner: int) -> Shapes:
    """Gated MLP."""
    return {
        f"{at}.gate_proj.weight": (inner, hidden),
        f"{at}.up_proj.weight": (inner, hidden),
        f"{at}.down_proj.weight": (hidden, inner),
    }


def moe(at: str, text: Mapping[str, Any], *, fused: bool) -> Shapes:
    """Router, routed experts, shared expert and its scalar gate."""
    hidden, experts, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    shapes: Shapes = {
        f"{at}.mlp.gate.weight": (experts, hidden),
        f"{at}.mlp.shared_expert_gate.weight": (1, hidden),
        **mlp(f"{at}.mlp.shared_expert", hidden, text["shared_expert_intermediate_size"]),
    }
    if fused:
        shapes[f"{at}.mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
        shapes[f"{at}.mlp.experts.down_proj"] = (experts, hidden, inner)
    else:
        for expert in range(experts):
            shapes |= mlp(f"{at}.mlp.experts.{expert}", hidden, inner)
    return shapes


def block_norms(at: str, hidden: int) -> Shapes:
    """The two norms of a decoder block."""
    return {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}


def draft_head(text: Mapping[str, Any], *, fused: bool) -> Shapes:
    """MTP: one full-attention block behind `fc`; embedding and lm_head are those of the model."""
    hidden, at = text["hidden_size"], "mtp.layers.0"
    inner = (
        moe(at, text, fused=fused) if text.get("num_experts") else mlp(f"{at}.mlp", hidden, text["intermediate_size"])
    )
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        **attention(at, text),
        **inner,
        **block_norms(at, hidden),
    }


def vision(tower: Mapping[str, Any]) -> Shapes:
    """Vision tower and merger, every weight with a bias except the position table."""
    width, inner, patch = tower["hidden_size"], tower["intermediate_size"], tower["patch_size"]
    merged = width * tower["spatial_merge_size"] ** 2
    weights: Shapes = {
        "patch_embed.proj": (width, tower.get("in_channels", 3), tower["temporal_patch_size"], patch, patch),
        "merger.norm": (width,),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (tower["out_hidden_size"], merged),
    }
    for block in range(tower["depth"]):
        weights |= {
            f"blocks.{block}.norm1": (width,),
            f"blocks.{block}.norm2": (width,),
            f"blocks.{block}.attn.qkv": (3 * width, width),
            f"blocks.{block}.attn.proj": (width, width),
            f"blocks.{block}.mlp.linear_fc1": (inner, width),
            f"blocks.{block}.mlp.linear_fc2": (width, inner),
        }
    shapes: Shapes = {"model.visual.pos_embed.weight": (tower["num_position_embeddings"], width)}
    for name, shape in weights.items():
        shapes[f"model.visual.{name}.weight"] = shape
        shapes[f"model.visual.{name}.bias"] = (shape[0],)
    return shapes
