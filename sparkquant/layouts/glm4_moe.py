"""GLM-4.5 and 4.6: grouped-query attention with biases, mixture of experts, draft head as the layer behind the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import Layout, TensorRule, config_int
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _mla, _nextn
from sparkquant.sizes import Sizes, whole

MODEL_TYPES = ("glm4_moe",)
ARCHITECTURES = ("Glm4MoeForCausalLM",)


def block(at: str) -> tuple[TensorRule, ...]:
    """One decoder layer."""
    return (*_mla.mixture(at), *d.attention(at, qk_norms="[qk]_norm"))


def sizes(config: Mapping[str, Any]) -> Sizes:
    """All shared experts together are one MLP."""
    return {
        "Is": ("n_shared_experts * moe_intermediate_size", whole(config, "n_shared_experts", "moe_intermediate_size"))
    }


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a GLM-4-MoE checkpoint."""
    layers = config_int(config, "num_hidden_layers", 46)
    return Layout(
        family="glm4_moe",
        rules=(*_nextn.decoder_and_draft(r"model\.", layers, block), *d.top()),
        mtp=_nextn.rule(config, layers),
        ignore_always=_mla.IGNORE,
        tied_head=d.tied(config),
        experts=(config_int(config, "n_routed_experts", 0), config_int(config, "num_experts_per_tok", 0)),
    )
