"""Bamba: Mamba-2 with a few attention layers. vLLM removed it; transformers runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import ENGINES, NO_DRAFT_HEAD, Layout, Limit, config_int
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _mamba
from sparkquant.sizes import Sizes, even_heads

MODEL_TYPES = ("bamba",)
ARCHITECTURES = ("BambaForCausalLM",)


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Heads share hidden_size."""
    return even_heads(config)


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Bamba checkpoint."""
    at = r"model\.layers\.\d+"
    return Layout(
        family="bamba",
        rules=(
            *d.top(norm="final_layernorm"),
            *_mamba.mamba2(at, "mamba", config_int(config, "mamba_n_groups", 0), aliases=(r"layers\.{n}\.mixer",)),
            *d.attention(at),
            *d.mlp(at, "feed_forward"),
            *d.norms(at, "input_layernorm", "pre_ff_layernorm"),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(r"re:.*(?:mamba|mixer)\.conv1d$", r"re:.*embed_tokens$"),
        tied_head=d.tied(config),
        absent=(Limit(ENGINES, d.REMOVED),),
    )
