"""Kimi Linear: KDA on three layers of four, latent attention on the others, w1/w2/w3 experts, a dense first layer.

`self_attn.q_proj` and `o_proj` exist on both kinds of layer, so the class of a tensor depends on the layer's number.
From 0.33 on the engine merges a KDA layer's q, k, v with b and f_a into `in_proj_qkvgfab`: the gates stay 16-bit, so
q, k and v do too, unless the result is meant for an older version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout, Limit, config_int
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _kda, _mla
from sparkquant.layouts._indices import among
from sparkquant.sizes import Sizes, whole

MODEL_TYPES = ("kimi_linear",)
ARCHITECTURES = ("KimiLinearForCausalLM",)

MERGED = Limit(("0.33",), "merged with the recurrence gates b and f_a into in_proj_qkvgfab, which stays 16-bit")
_MOE = r"block_sparse_moe"


def sizes(config: Mapping[str, Any]) -> Sizes:
    """KDA has heads of its own; all shared experts together are one MLP."""
    listed = config.get("linear_attn_config")
    net = listed if isinstance(listed, Mapping) else {}
    return {
        "h": ("linear_attn_config.num_heads", net.get("num_heads")),
        "p": ("linear_attn_config.head_dim", net.get("head_dim")),
        "Is": ("num_shared_experts * moe_intermediate_size",
               whole(config, "num_shared_experts", "moe_intermediate_size")),
    }  # fmt: skip


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Kimi-Linear checkpoint."""
    layers = config_int(config, "num_hidden_layers", 27)
    linear = _kda.linear_layers(config, layers)
    at = r"model\.layers\.\d+"
    return Layout(
        family="kimi_linear",
        rules=(
            *d.experts(at, rf"{_MOE}\.experts", names=("w1", "w3", "w2")),
            *d.top(),
            *_kda.kda(rf"model\.layers\.{among(linear)}", qkv=(MERGED,)),
            *_mla.mla(rf"model\.layers\.{among(set(range(layers)) - linear)}"),
            *d.mlp(at),
            *d.shared_experts(at, rf"{_MOE}\.shared_experts", aliases=(r"layers\.{n}\.mlp\.shared_experts",)),
            d.kept(rf"{at}\.{_MOE}\.gate\.(?:weight|e_score_correction_bias)", C.ROUTER),
            *d.norms(at, "input_layernorm", "post_attention_layernorm"),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(*_kda.IGNORE, r"re:.*block_sparse_moe\.gate$", r"re:.*embed_tokens$"),
        tied_head=d.tied(config),
        experts=(config_int(config, "num_experts", 0), config_int(config, "num_experts_per_token", 0)),
        live_names=(
            (r"(.*)block_sparse_moe\.experts\.(\d+)\.w1\.weight$", r"\1mlp.experts.\2.gate_proj.weight"),
            (r"(.*)block_sparse_moe\.experts\.(\d+)\.w3\.weight$", r"\1mlp.experts.\2.up_proj.weight"),
            (r"(.*)block_sparse_moe\.experts\.(\d+)\.w2\.weight$", r"\1mlp.experts.\2.down_proj.weight"),
            (r"(.*)block_sparse_moe\.", r"\1mlp."),
            *_kda.LIVE_NAMES,
        ),
    )
