"""MiniMax-M2: full attention with norms over all heads, w1/w2/w3 experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout, config_int
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.layouts.minimax import LIVE_NAMES
from sparkquant.sizes import Sizes

MODEL_TYPES = ("minimax_m2",)
ARCHITECTURES = ("MiniMaxM2ForCausalLM",)


def sizes(config: Mapping[str, Any]) -> Sizes:
    """intermediate_size is that of one expert."""
    return {"Im": ("intermediate_size", config.get("intermediate_size"))}


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a MiniMax-M2 checkpoint in 16 bits."""
    at = r"model\.layers\.\d+"
    moe = "block_sparse_moe"
    return Layout(
        family="minimax_m2",
        rules=(
            *d.experts(at, rf"{moe}\.experts", names=("w1", "w3", "w2"), aliases=(r"layers\.{n}\.mlp\.experts",)),
            *d.top(),
            *d.attention(at, qk_norms="[qk]_norm"),
            d.kept(rf"{at}\.{moe}\.(?:gate\.weight|e_score_correction_bias)", C.ROUTER),
            *d.norms(at, "input_layernorm", "post_attention_layernorm"),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(r"re:.*(?:block_sparse_moe|mlp)\.gate$", r"re:.*embed_tokens$"),
        tied_head=d.tied(config),
        experts=(config_int(config, "num_local_experts", 0), config_int(config, "num_experts_per_tok", 0)),
        live_names=LIVE_NAMES,
    )
