"""MiniMax-Text-01: lightning attention with fixed decays, full attention on some layers, w1/w2/w3 experts everywhere.

vLLM removed it; transformers runs it. Decay tables are stored as buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import ENGINES, NO_DRAFT_HEAD, Layout, Limit, config_int
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.sizes import Sizes

MODEL_TYPES = ("minimax",)
ARCHITECTURES = ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM")

LIVE_NAMES = (
    (r"(.*)block_sparse_moe\.experts\.(\d+)\.w1\.weight$", r"\1mlp.experts.\2.gate_proj.weight"),
    (r"(.*)block_sparse_moe\.experts\.(\d+)\.w3\.weight$", r"\1mlp.experts.\2.up_proj.weight"),
    (r"(.*)block_sparse_moe\.experts\.(\d+)\.w2\.weight$", r"\1mlp.experts.\2.down_proj.weight"),
    (r"(.*)block_sparse_moe\.", r"\1mlp."),
)


def sizes(config: Mapping[str, Any]) -> Sizes:
    """intermediate_size is that of one expert."""
    return {"Im": ("intermediate_size", config.get("intermediate_size"))}


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a MiniMax-Text-01 checkpoint."""
    at = r"model\.layers\.\d+"
    path = rf"{at}\.self_attn"
    return Layout(
        family="minimax",
        rules=(
            *d.experts(at, r"block_sparse_moe\.experts", names=("w1", "w3", "w2")),
            *d.top(),
            d.linear(rf"{path}\.qkv_proj", C.LINEAR_ATTENTION_QKVZ, shape="3*A*D, H"),
            d.linear(rf"{path}\.output_gate", C.LINEAR_ATTENTION_QKVZ, shape="A*D, H"),
            d.linear(rf"{path}\.out_proj", C.LINEAR_ATTENTION_OUT, row_parallel=True, shape="H, A*D"),
            d.kept(rf"{path}\.norm\.weight", C.NORM),
            d.kept(rf"{path}\.(?:slope_rate|query_decay|key_decay|diagonal_decay)", C.STATE),
            *d.attention(at),
            d.kept(rf"{at}\.block_sparse_moe\.gate\.weight", C.ROUTER),
            *d.norms(at, "input_layernorm", "post_attention_layernorm"),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(r"re:.*(?:block_sparse_moe|mlp)\.gate$", r"re:.*embed_tokens$"),
        tied_head=d.tied(config),
        experts=(config_int(config, "num_local_experts", 0), config_int(config, "num_experts_per_tok", 0)),
        live_names=LIVE_NAMES,
        absent=(Limit(ENGINES, d.REMOVED),),
    )
