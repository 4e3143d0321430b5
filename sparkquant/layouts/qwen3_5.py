"""Qwen3.5 / 3.6 / 3.8 dense: four separate delta-net projections, vision tower, MTP; also the text-only class.

The engine fuses `in_proj_qkv` + `in_proj_z` and `in_proj_b` + `in_proj_a`, so each pair shares one scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import LayerClass as C
from sparkquant.layers import Layout, MtpRule, TensorRule
from sparkquant.layouts import _qwen as q

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")


def delta_net(at: str) -> tuple[TensorRule, ...]:
    """in_proj_qkv [2*Kl*Dk + Vl*Dv, H], in_proj_z [Vl*Dv, H], in_proj_b and in_proj_a [Vl, H], out_proj [H, Vl*Dv]."""
    return (
        TensorRule(
            rf"{at}\.linear_attn\.in_proj_qkv\.weight", C.LINEAR_ATTENTION_QKVZ, fused="in_proj_qkvz", linear=True,
            shape="2*Kl*Dk+Vl*Dv, H",
        ),
        TensorRule(
            rf"{at}\.linear_attn\.in_proj_z\.weight", C.LINEAR_ATTENTION_QKVZ, fused="in_proj_qkvz", linear=True,
            shape="Vl*Dv, H",
        ),
        TensorRule(rf"{at}\.linear_attn\.in_proj_[ab]\.weight", C.LINEAR_ATTENTION_GATES, shape="Vl, H"),
        TensorRule(
            rf"{at}\.linear_attn\.out_proj\.weight", C.LINEAR_ATTENTION_OUT, linear=True, row_parallel=True,
            shape="H, Vl*Dv",
        ),
        *q.delta_net_state(at),
    )  # fmt: skip


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part of a multimodal config, or the config itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def tied(config: Mapping[str, Any]) -> bool:
    """Whether lm_head reads the embedding (declared at the top level or in the text part)."""
    return bool(config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings", False)))


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a dense Qwen3.5-type checkpoint, multimodal or text-only."""
    text = text_config(config)
    at = q.LAYERS
    return Layout(
        family="qwen3_5",
        rules=(
            *q.top(),
            *delta_net(at),
            *q.attention(at),
            *q.mlp(at),
            *q.norms(at),
            *q.vision(),
            *q.draft_head(experts=False),
        ),
        mtp=MtpRule(declared=bool(text.get("mtp_num_hidden_layers") or 0), config_key="mtp_num_hidden_layers"),
        ignore_always=q.IGNORE,
        tied_head=tied(config),
        live_names=q.LIVE_NAMES,
        absent=(q.TEXT_ONLY,) if str(config.get("model_type")).endswith("_text") else (),
    )
