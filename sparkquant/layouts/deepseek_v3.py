"""DeepSeek V3 and R1: latent attention, mixture of experts, draft head as the layer behind the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import Layout, TensorRule, config_int
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _mla, _nextn
from sparkquant.sizes import Sizes, whole

MODEL_TYPES = ("deepseek_v3",)
ARCHITECTURES = ("DeepseekV3ForCausalLM",)


def block(at: str) -> tuple[TensorRule, ...]:
    """One decoder layer."""
    return (*_mla.mixture(at), *_mla.mla(at))


def sizes(config: Mapping[str, Any]) -> Sizes:
    """All shared experts together are one MLP."""
    return {
        "Is": ("n_shared_experts * moe_intermediate_size", whole(config, "n_shared_experts", "moe_intermediate_size"))
    }


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a DeepSeek-V3 checkpoint in 16 bits."""
    layers = config_int(config, "num_hidden_layers", 61)
    return Layout(
        family="deepseek_v3",
        rules=(*_nextn.decoder_and_draft(r"model\.", layers, block), *d.top()),
        mtp=_nextn.rule(config, layers),
        ignore_always=_mla.IGNORE,
        tied_head=d.tied(config),
        experts=(config_int(config, "n_routed_experts", 0), config_int(config, "num_experts_per_tok", 0)),
    )
