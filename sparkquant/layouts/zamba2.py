"""Zamba2: Mamba-2 in every layer; some layers also run one of few shared transformer blocks, with adapters per use.

A shared block is stored once, in the first layer that runs it. The engine asks its config about it as `model.qkv_proj`,
and about mixers under numbers that count on from the number of hybrid layers: `{H + n}.mixer.in_proj`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout, config_int
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _mamba
from sparkquant.sizes import Sizes, whole

MODEL_TYPES = ("zamba2",)
ARCHITECTURES = ("Zamba2ForCausalLM",)

_SHARED = "shared_transformer"


def hybrid_layers(config: Mapping[str, Any]) -> int:
    """How many layers run a shared block."""
    kinds = config.get("layers_block_type")
    listed = config.get("hybrid_layer_ids")
    if isinstance(kinds, list):
        return sum(kind == "hybrid" for kind in kinds)
    return len(listed) if isinstance(listed, list) else 0


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Mamba heads share the expanded width."""
    heads, inner = config.get("n_mamba_heads"), whole(config, "mamba_expand", "hidden_size")
    width = inner // heads if type(heads) is int and heads > 0 and inner is not None else None
    return {"h": ("n_mamba_heads", heads), "p": ("mamba_expand * hidden_size / n_mamba_heads", width)}


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Zamba2 checkpoint."""
    at = r"model\.layers\.\d+"
    shared = rf"{at}\.{_SHARED}"
    hybrids, groups = hybrid_layers(config), config_int(config, "mamba_ngroups", 0)
    return Layout(
        family="zamba2",
        rules=(
            *d.top(norm="final_layernorm", plain_head=True),
            *_mamba.mamba2(
                at, r"(?:mamba_decoder\.)?mamba", groups, aliases=(rf"{{n+{hybrids}}}\.mixer",)
            ),
            # Reads the embedding beside the hidden states: twice as wide.
            *(replace(rule, shape="") for rule in d.attention(shared, aliases=("model",))),
            d.linear(
                rf"{shared}\.feed_forward\.gate_up_proj", C.MLP_GATE_UP, aliases=(r"model\.feed_forward",),
                shape="2*I, H",
            ),
            d.linear(
                rf"{shared}\.feed_forward\.down_proj", C.MLP_DOWN, row_parallel=True,
                aliases=(r"model\.feed_forward",), shape="H, I",
            ),
            d.kept(
                rf"{shared}\.(?:self_attn\.linear_[qkv]|feed_forward\.gate_up_proj)_adapter_list\.\d+\.[01]\.weight",
                C.ADAPTER, optional=True,
            ),
            d.kept(rf"{at}\.linear\.weight", C.ADAPTER),
            *d.norms(at, r"(?:mamba_decoder\.)?input_layernorm"),
            *d.norms(shared, "input_layernorm", "pre_ff_layernorm"),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(
            r"re:.*(?:mamba|mixer)\.conv1d$",
            r"re:.*_adapter(?:_list)?\..*",
            r"re:.*\d+\.linear$",
            r"re:.*embed_tokens$",
        ),
        tied_head=d.tied(config, default=True),
    )  # fmt: skip
