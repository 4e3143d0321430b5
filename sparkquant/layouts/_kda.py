"""Kimi delta attention (KDA): a linear attention whose gates are tensors of their own.

Shapes: h heads of width w, H hidden. q, k, v [h*w, H]; b [h, H]; f_a [w, H] and f_b [h*w, w] (decay); g_a [w, H] and
g_b [h*w, w] (output gate); o [H, h*w]; three convolutions [h*w, 1, 4]; A_log and dt_bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import LayerClass as C
from sparkquant.layers import Limit, TensorRule
from sparkquant.layouts._decoder import kept, linear

IGNORE = (
    r"re:.*self_attn\.b_proj$",
    r"re:.*self_attn\.f_a_proj$",
    r"re:.*self_attn\.f_b_proj$",
    r"re:.*self_attn\.g_a_proj$",
    r"re:.*self_attn\.g_b_proj$",
    r"re:.*self_attn\.[qkv]_conv1d$",
)


def kda(at: str, *, qkv: tuple[Limit, ...] = (), out: tuple[Limit, ...] = ()) -> tuple[TensorRule, ...]:
    """One KDA layer; `qkv` and `out` say where the engine takes those projections in 16 bits only."""
    path = rf"{at}\.self_attn"
    return (
        linear(rf"{path}\.[qkv]_proj", C.LINEAR_ATTENTION_QKVZ, plain=qkv, shape="h*p, H"),
        linear(rf"{path}\.o_proj", C.LINEAR_ATTENTION_OUT, row_parallel=True, plain=out, shape="H, h*p"),
        kept(rf"{path}\.(?:b_proj|f_a_proj|f_b_proj)\.weight", C.LINEAR_ATTENTION_GATES),
        kept(rf"{path}\.(?:A_log|dt_bias)", C.LINEAR_ATTENTION_GATES),
        kept(rf"{path}\.g_[ab]_proj\.weight", C.ADAPTER),
        kept(rf"{path}\.[qkv]_conv1d\.weight", C.LINEAR_ATTENTION_CONV),
        kept(rf"{path}\.o_norm\.weight", C.NORM),
    )


LIVE_NAMES = (
    (r"(.*self_attn)\.(f_[ab]_proj\.weight|A_log|dt_bias)$", r"\1.forget_gate.\2"),
    *((rf"(.*self_attn)\.{part}_conv1d\.weight$", rf"\1.conv1d.weight[{i}/3]") for i, part in enumerate("qkv")),
)
"""A live model keeps the gates in a module of their own, and the three convolutions in one."""


def linear_layers(text: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Numbers of the KDA layers: listed from 1 in published configs, as layer_types in newer ones, else 3 in 4."""
    listed = text.get("linear_attn_config")
    if isinstance(listed, Mapping) and isinstance(listed.get("kda_layers"), list):
        return frozenset(index - 1 for index in listed["kda_layers"] if type(index) is int)
    types = text.get("layer_types")
    if isinstance(types, list):
        return frozenset(index for index, kind in enumerate(types) if kind == "linear_attention")
    return frozenset(index for index in range(layers) if (index + 1) % 4)
