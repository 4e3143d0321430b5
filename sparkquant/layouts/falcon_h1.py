"""Falcon-H1: attention and Mamba-2 side by side in every layer, then a gated MLP.

The engine asks its config about the attention directly below the layer, and about the mixer under a number of its own
behind the last layer: `model.{N + n}.mixer.in_proj`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout, config_int
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _mamba

MODEL_TYPES = ("falcon_h1",)
ARCHITECTURES = ("FalconH1ForCausalLM",)


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Falcon-H1 checkpoint."""
    at = r"model\.layers\.\d+"
    layers, groups = config_int(config, "num_hidden_layers", 0), config_int(config, "mamba_n_groups", 0)
    return Layout(
        family="falcon_h1",
        rules=(
            *d.top(norm="final_layernorm", plain_head=True),
            *d.attention(at, aliases=(r"layers\.{n}",)),
            *_mamba.mamba2(at, "mamba", groups, aliases=(rf"model\.{{n+{layers}}}\.mixer",)),
            *d.mlp(at, "feed_forward"),
            *d.norms(at, "input_layernorm", "pre_ff_layernorm"),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(r"re:.*(?:mamba|mixer)\.conv1d$", r"re:.*embed_tokens$"),
        tied_head=d.tied(config),
    )
