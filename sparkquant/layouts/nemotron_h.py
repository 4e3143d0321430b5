"""Nemotron-H and Nemotron-3: one mixer a layer (Mamba-2, MLP without a gate, attention, or experts), flat draft head.

The MLP is `down(relu(up)^2)`: there is no gate_proj, so `mlp.gate_up` and `experts.gate_up` hold up_proj alone. Experts
of the Nano are 1856 wide: no multiple of 128, so int4 there needs groups of 64 or 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import LayerClass as C
from sparkquant.layers import Layout, MtpRule, TensorRule, config_int
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _mamba
from sparkquant.sizes import Sizes

MODEL_TYPES = ("nemotron_h",)
ARCHITECTURES = ("NemotronHForCausalLM",)


def blocks(at: str) -> tuple[TensorRule, ...]:
    """Attention, MLP and mixture of experts; latent projections lead into and out of the experts of larger models."""
    path = rf"{at}\.mixer"
    return (
        d.linear(rf"{path}\.experts\.\d+\.up_proj", C.EXPERTS_GATE_UP, shape="Im, X"),
        d.linear(rf"{path}\.experts\.\d+\.down_proj", C.EXPERTS_DOWN, row_parallel=True, shape="X, Im"),
        *d.attention(at, "mixer"),
        d.linear(rf"{path}\.up_proj", C.MLP_GATE_UP, shape="I, H"),
        d.linear(rf"{path}\.down_proj", C.MLP_DOWN, row_parallel=True, shape="H, I"),
        d.linear(rf"{path}\.shared_experts\.up_proj", C.SHARED_EXPERT_GATE_UP, shape="Is, H"),
        d.linear(rf"{path}\.shared_experts\.down_proj", C.SHARED_EXPERT_DOWN, row_parallel=True, shape="H, Is"),
        d.kept(rf"{path}\.(?:shared_experts\.)?(?:up|down)_proj\.bias", C.STATE),
        d.kept(rf"{path}\.gate\.(?:weight|e_score_correction_bias)", C.ROUTER),
        d.kept(rf"{path}\.fc[12]_latent_proj\.(?:weight|bias)", C.ADAPTER),
        *d.norms(at, "norm"),
    )


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Experts of larger models work in a latent space (X)."""
    latent = config.get("moe_latent_size")
    key = "moe_latent_size" if latent else "hidden_size"
    shared = "moe_shared_expert_intermediate_size"
    return {"X": (key, config.get(key)), "Is": (shared, config.get(shared))}


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Nemotron-H checkpoint, dense or a mixture of experts."""
    at, draft = r"backbone\.layers\.\d+", r"mtp\.layers\.\d+"
    return Layout(
        family="nemotron_h",
        rules=(
            *blocks(at),
            *d.top(r"backbone\.", embed="embeddings", norm="norm_f"),
            *_mamba.mamba2(at, "mixer", config_int(config, "n_groups", 0)),
            *d.as_draft(blocks(draft)),
            d.kept(rf"{draft}\.(?:enorm|hnorm|eh_proj|final_layernorm)\.weight", C.MTP),
        ),
        mtp=MtpRule(
            declared=bool(config.get("num_nextn_predict_layers") or 0),
            config_key="num_nextn_predict_layers",
            plain=(r"re:.*mtp\..*eh_proj$", r"re:.*mtp\..*latent_proj$"),
        ),
        ignore_always=(
            r"re:.*mixer\.conv1d$",
            r"re:.*mixer\.gate$",
            r"re:.*mixer\.fc[12]_latent_proj$",
            r"re:.*embeddings$",
        ),
        tied_head=d.tied(config),
        experts=(config_int(config, "n_routed_experts", 0), config_int(config, "num_experts_per_tok", 0)),
        live_names=((r"^backbone\.", "model."),),
    )
