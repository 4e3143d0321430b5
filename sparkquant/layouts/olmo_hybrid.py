"""OLMo hybrid: gated delta net with separate q, k, v, g and a, b projections; full attention on every fourth layer.

The engine merges q, k, v and g into `in_proj_qkvg` and keeps a and b apart, for their precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.sizes import Sizes, even_heads

MODEL_TYPES = ("olmo_hybrid",)
ARCHITECTURES = ("OlmoHybridForCausalLM",)

_NORMS = (
    "input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm", "attention_layer_norm",
    "feedforward_layer_norm",
)  # fmt: skip


def convolutions(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Rows that the three convolutions have in a live model's one: keys twice, then values."""
    keys = int(config.get("linear_num_key_heads") or 0) * int(config.get("linear_key_head_dim") or 0)
    values = int(config.get("linear_num_value_heads") or 0) * int(config.get("linear_value_head_dim") or 0)
    spans = {"q": (0, keys), "k": (keys, 2 * keys), "v": (2 * keys, 2 * keys + values)}
    return tuple(
        (rf"(.*linear_attn)\.{part}_conv1d\.weight$", rf"\1.conv1d.weight[{first}:{last}]")
        for part, (first, last) in spans.items()
    )


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Heads share hidden_size."""
    return even_heads(config)


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of an OLMo-hybrid checkpoint."""
    at = r"model\.layers\.\d+"
    net = rf"{at}\.linear_attn"
    return Layout(
        family="olmo_hybrid",
        rules=(
            *d.top(),
            d.linear(rf"{net}\.[qkvg]_proj", C.LINEAR_ATTENTION_QKVZ, "in_proj_qkvg", shape="Kl*Dk|Vl*Dv, H"),
            d.linear(rf"{net}\.o_proj", C.LINEAR_ATTENTION_OUT, row_parallel=True, shape="H, Vl*Dv"),
            d.kept(rf"{net}\.(?:[ab]_proj\.weight|A_log|dt_bias)", C.LINEAR_ATTENTION_GATES),
            d.kept(rf"{net}\.[qkv]_conv1d\.weight", C.LINEAR_ATTENTION_CONV),
            d.kept(rf"{net}\.o_norm\.weight", C.NORM),
            *d.attention(at, qk_norms="[qk]_norm"),
            *d.mlp(at),
            *d.norms(at, *_NORMS),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(
            r"re:.*linear_attn\.a_proj$",
            r"re:.*linear_attn\.b_proj$",
            r"re:.*linear_attn\.(?:[qkv]_)?conv1d$",
            r"re:.*embed_tokens$",
        ),
        tied_head=d.tied(config),
        live_names=(
            (r"(.*)\.attention_layer_norm\.", r"\1.input_layernorm."),
            (r"(.*)\.feedforward_layer_norm\.", r"\1.post_attention_layernorm."),
            *convolutions(config),
        ),
    )
