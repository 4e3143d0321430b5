"""Qwen3-Next: fused, row-interleaved `in_proj_qkvz` / `in_proj_ba`, per-expert MoE with a shared expert, MTP.

The rows of `in_proj_qkvz` are interleaved per key head ([q, k, v, z] of one head, then the next): per-row scales are
right, anything that assumes contiguous q, k, v, z blocks is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import LayerClass as C
from sparkquant.layers import Layout, MtpRule, TensorRule, config_int
from sparkquant.layouts import _qwen as q
from sparkquant.layouts._decoder import PLAIN_HEAD

MODEL_TYPES = ("qwen3_next",)
ARCHITECTURES = ("Qwen3NextForCausalLM",)


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Qwen3-Next checkpoint."""
    at = q.LAYERS
    return Layout(
        family="qwen3_next",
        rules=(
            *q.top(plain_head=(PLAIN_HEAD,)),
            TensorRule(
                rf"{at}\.linear_attn\.in_proj_qkvz\.weight",
                C.LINEAR_ATTENTION_QKVZ,
                linear=True,
                shape="2*Kl*Dk+2*Vl*Dv, H",
            ),
            TensorRule(rf"{at}\.linear_attn\.in_proj_ba\.weight", C.LINEAR_ATTENTION_GATES, shape="2*Vl, H"),
            TensorRule(
                rf"{at}\.linear_attn\.out_proj\.weight",
                C.LINEAR_ATTENTION_OUT,
                linear=True,
                row_parallel=True,
                shape="H, Vl*Dv",
            ),
            *q.delta_net_state(at),
            *q.attention(at),
            *q.mlp(at),
            *q.moe(at),
            *q.shared_expert(at),
            *q.router(at),
            *q.norms(at),
            *q.draft_head(experts=True),
        ),
        # Published configs of this family do not declare the head: its tensors are the declaration.
        mtp=MtpRule(declared=bool(config.get("mtp_num_hidden_layers") or 0), config_key="mtp_num_hidden_layers"),
        ignore_always=q.IGNORE,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        experts=(config_int(config, "num_experts", 0), config_int(config, "num_experts_per_tok", 0)),
    )
