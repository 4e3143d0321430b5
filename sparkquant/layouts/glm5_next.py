"""GLM-5.3-Flash: KDA and sparse latent attention, hyper-connections, experts, a vision tower, draft head by number.

The engine builds all attention of this family without a quantization config: only MLP, experts and lm_head take a
scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import LayerClass as C
from sparkquant.layers import Layout, Limit, TensorRule, config_int
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _kda, _mla, _nextn
from sparkquant.layouts._indices import among, at_least
from sparkquant.sizes import Sizes, whole

MODEL_TYPES = ("glm5_next",)
ARCHITECTURES = ("Glm5NextForConditionalGeneration",)

ABSENT = Limit(("0.25", "0.26"), "Glm5NextForConditionalGeneration came later")
PLAIN_KDA = Limit(("0.33",), "the engine builds KDA of this family without a quantization config")
PLAIN_MLA = Limit(("0.33",), "the engine builds the latent attention of this family without a quantization config")
_PATH = r"model\.language_model\."


def _common(at: str) -> tuple[TensorRule, ...]:
    return (
        *_mla.mixture(at),
        d.kept(rf"{at}\.hc_(?:attn|ffn)_(?:fn|base|scale)", C.ADAPTER),
    )


def _sparse(at: str) -> tuple[TensorRule, ...]:
    return (
        *_mla.mla(at, plain=(PLAIN_MLA,)),
        *_mla.indexer(at),
        d.kept(rf"{at}\.self_attn\.indexer\.index_kpool_compress_(?:ape|gate)", C.ROUTER),
    )


def sizes(config: Mapping[str, Any]) -> Sizes:
    """KDA has heads of its own; all shared experts together are one MLP."""
    return {
        "h": ("linear_num_heads", whole(config, "linear_num_heads")),
        "p": ("linear_head_dim", whole(config, "linear_head_dim")),
        "Is": ("n_shared_experts * moe_intermediate_size", whole(config, "n_shared_experts", "moe_intermediate_size")),
    }


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a GLM-5-Next checkpoint."""
    text = d.text_config(config)
    layers = config_int(text, "num_hidden_layers", 45)
    linear = _kda.linear_layers(text, layers)
    behind = rf"{_PATH}layers\.{at_least(layers)}"
    return Layout(
        family="glm5_next",
        rules=(
            *_nextn.decoder_and_draft(_PATH, layers, _common),
            *_kda.kda(rf"{_PATH}layers\.{among(linear)}", qkv=(PLAIN_KDA,), out=(PLAIN_KDA,)),
            *_sparse(rf"{_PATH}layers\.{among(set(range(layers)) - linear)}"),
            *d.as_draft(_sparse(behind)),
            *d.top(_PATH),
            d.kept(r"model\.visual\.(?:patch_embed|blocks|post_layernorm|downsample|merger)\..+", C.VISION),
        ),
        mtp=_nextn.rule(text, layers),
        ignore_always=(*_mla.IGNORE, *_mla.INDEXER_IGNORE, *_kda.IGNORE, r"re:.*visual\..*"),
        tied_head=d.tied(config),
        experts=(config_int(text, "n_routed_experts", 0), config_int(text, "num_experts_per_tok", 0)),
        live_names=(
            *_kda.LIVE_NAMES,
            (r"(.*layers\.\d+)\.hc_(attn|ffn)_(fn|base|scale)$", r"\1.\2_hc.\3"),
        ),
        absent=(ABSENT,),
    )
