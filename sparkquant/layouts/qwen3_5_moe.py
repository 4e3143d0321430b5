"""Qwen3.5 / 3.6 MoE: the delta net of Qwen3.5 with fused 3-D experts and a shared expert; MTP is a MoE block too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import Layout, MtpRule, config_int
from sparkquant.layouts import _qwen as q
from sparkquant.layouts.qwen3_5 import delta_net, text_config, tied

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Qwen3.5-MoE-type checkpoint, multimodal or text-only, experts fused or per expert."""
    text = text_config(config)
    at = q.LAYERS
    return Layout(
        family="qwen3_5_moe",
        rules=(
            *q.top(),
            *delta_net(at),
            *q.attention(at),
            *q.moe(at),
            *q.shared_expert(at),
            *q.router(at),
            *q.norms(at),
            *q.vision(),
            *q.draft_head(experts=True),
        ),
        mtp=MtpRule(declared=bool(text.get("mtp_num_hidden_layers") or 0), config_key="mtp_num_hidden_layers"),
        ignore_always=q.IGNORE,
        tied_head=tied(config),
        live_names=q.LIVE_NAMES,
        absent=(q.TEXT_ONLY,) if str(config.get("model_type")).endswith("_text") else (),
        experts=(config_int(text, "num_experts", 0), config_int(text, "num_experts_per_tok", 0)),
    )
