"""Jamba: Mamba-1, attention on every eighth layer, experts on every second one.

The engine builds the Mamba-1 mixer without a quantization config, so only attention, MLP and experts take schemes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout, config_int
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _mamba
from sparkquant.sizes import Sizes, even_heads, whole

MODEL_TYPES = ("jamba",)
ARCHITECTURES = ("JambaForCausalLM",)


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Experts are as wide as the MLPs of other layers."""
    inner = whole(config, "mamba_expand", "hidden_size")
    return {
        **even_heads(config),
        "Im": ("intermediate_size", config.get("intermediate_size")), "d": ("mamba_expand * hidden_size", inner),
    }  # fmt: skip


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Jamba checkpoint."""
    at = r"model\.layers\.\d+"
    return Layout(
        family="jamba",
        rules=(
            *d.experts(at, r"feed_forward\.experts"),
            *d.top(norm="final_layernorm", plain_head=True),
            *_mamba.mamba1(at, "mamba", aliases=(r"layers\.{n}\.mixer",)),
            *d.attention(at, aliases=(r"layers\.{n}",)),
            *d.mlp(at, "feed_forward"),
            d.kept(rf"{at}\.feed_forward\.router\.weight", C.ROUTER),
            *d.norms(at, "input_layernorm", "pre_ff_layernorm"),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(
            r"re:.*(?:mamba|mixer)\.(?:conv1d|x_proj|dt_proj)$",
            r"re:.*feed_forward\.router$",
            r"re:.*embed_tokens$",
        ),
        tied_head=d.tied(config),
        experts=(config_int(config, "num_experts", 0), config_int(config, "num_experts_per_tok", 0)),
    )
