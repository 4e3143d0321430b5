"""LFM2 as a mixture of experts: w1/w2/w3 experts behind the first dense layers, a bias that balances the router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout, config_int
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _lfm2
from sparkquant.layouts.lfm2 import tied
from sparkquant.sizes import Sizes, even_heads

MODEL_TYPES = ("lfm2_moe",)
ARCHITECTURES = ("Lfm2MoeForCausalLM",)


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Heads share hidden_size."""
    return even_heads(config)


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of an LFM2-MoE checkpoint."""
    at = r"model\.layers\.\d+"
    return Layout(
        family="lfm2_moe",
        rules=(
            *d.experts(at, r"feed_forward\.experts", names=_lfm2.NAMES),
            *_lfm2.decoder(at),
            d.kept(rf"{at}\.feed_forward\.(?:gate\.weight|expert_bias)", C.ROUTER),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(*_lfm2.IGNORE, r"re:.*feed_forward\.gate$"),
        tied_head=tied(config),
        experts=(config_int(config, "num_experts", 0), config_int(config, "num_experts_per_tok", 0)),
        live_names=(
            (r"(.*feed_forward\.experts\.\d+)\.w1\.weight$", r"\1.gate_proj.weight"),
            (r"(.*feed_forward\.experts\.\d+)\.w3\.weight$", r"\1.up_proj.weight"),
            (r"(.*feed_forward\.experts\.\d+)\.w2\.weight$", r"\1.down_proj.weight"),
        ),
    )
