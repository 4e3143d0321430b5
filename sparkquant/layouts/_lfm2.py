"""LFM2: short convolutions with two multiplicative gates, attention on some layers, w1/w2/w3 MLPs."""

from __future__ import annotations

from sparkquant.layers import LayerClass as C
from sparkquant.layers import Limit, TensorRule
from sparkquant.layouts import _decoder as d

PLAIN_CONV = Limit(("0.25", "0.26"), "the engine builds the short convolution without a quantization config")

IGNORE = (r"re:.*(?:conv|short_conv)\.(?:conv|conv1d)$", r"re:.*embed_tokens$")

NAMES = ("w1", "w3", "w2")
"""gate, up and down."""


def short_conv(at: str) -> tuple[TensorRule, ...]:
    """in_proj [3*H, H] with rows B | C | x, out_proj [H, H], the convolution [H, 1, 3]."""
    aliases = (r"layers\.{n}\.short_conv",)
    return (
        d.linear(rf"{at}\.conv\.in_proj", C.SHORT_CONV, aliases=aliases, plain=(PLAIN_CONV,), shape="3*H, H"),
        d.linear(
            rf"{at}\.conv\.out_proj",
            C.SHORT_CONV,
            row_parallel=True,
            aliases=aliases,
            plain=(PLAIN_CONV,),
            shape="H, H",
        ),
        d.kept(rf"{at}\.conv\.(?:in|out)_proj\.bias", C.STATE),
        d.kept(rf"{at}\.conv\.conv\.(?:weight|bias)", C.SSM_CONV),
    )


def decoder(at: str) -> tuple[TensorRule, ...]:
    """Everything but experts."""
    return (
        *d.top(norm="embedding_norm"),
        *short_conv(at),
        *d.attention(at, out="out_proj", qk_norms="[qk]_layernorm"),
        *d.mlp(at, "feed_forward", names=NAMES, fused="w13"),
        *d.norms(at, "operator_norm", "ffn_norm"),
    )
