"""RecurrentGemma: a gated linear recurrence (RG-LRU) with local attention on every third layer. vLLM never ran it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import ENGINES, NO_DRAFT_HEAD, Layout, Limit
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.sizes import Sizes, whole

MODEL_TYPES = ("recurrent_gemma",)
ARCHITECTURES = ("RecurrentGemmaForCausalLM",)


def sizes(config: Mapping[str, Any]) -> Sizes:
    """MLPs are half of intermediate_size wide; W is the width of the recurrence."""
    inner = whole(config, "intermediate_size")
    key = "lru_width" if config.get("lru_width") else "hidden_size"
    return {"I": ("intermediate_size / 2", None if inner is None else inner // 2), "W": (key, config.get(key))}


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a RecurrentGemma checkpoint."""
    at = r"model\.layers\.\d+"
    path = rf"{at}\.temporal_block"
    return Layout(
        family="recurrent_gemma",
        rules=(
            *d.top(norm="final_norm"),
            *d.attention(at, "temporal_block"),
            d.linear(rf"{path}\.linear_[xy]", C.LINEAR_ATTENTION_QKVZ, shape="W, H"),
            d.linear(rf"{path}\.linear_out", C.LINEAR_ATTENTION_OUT, row_parallel=True, shape="H, W"),
            d.kept(rf"{path}\.linear_(?:[xy]|out)\.bias", C.STATE),
            d.kept(rf"{path}\.conv_1d\.(?:weight|bias)", C.LINEAR_ATTENTION_CONV),
            d.kept(
                rf"{path}\.rg_lru\.(?:(?:input|recurrent)_gate_(?:weight|bias)|recurrent_param)",
                C.LINEAR_ATTENTION_GATES,
            ),
            *d.mlp(at, "mlp_block"),
            *d.norms(at, "temporal_pre_norm", "channel_pre_norm"),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(r"re:.*rg_lru.*", r"re:.*temporal_block\.conv_1d$", r"re:.*embed_tokens$"),
        tied_head=d.tied(config, default=True),
        absent=(Limit(ENGINES, "RecurrentGemmaForCausalLM is in none of their registries"),),
    )
