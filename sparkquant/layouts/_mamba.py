"""Mamba mixers. Shapes: d inner width, N state, G groups, h heads, r rank of the time step."""

from __future__ import annotations

from dataclasses import replace

from sparkquant.layers import ENGINES, Limit, TensorRule
from sparkquant.layers import LayerClass as C
from sparkquant.layouts._decoder import kept, linear

PLAIN_MIXER = Limit(ENGINES, "the engine builds the Mamba-1 mixer without a quantization config")


def mamba2(at: str, path: str, groups: int, *, aliases: tuple[str, ...] = ()) -> tuple[TensorRule, ...]:
    """in_proj [2*d + 2*G*N + h, H] with rows z | x | B | C | dt, out_proj [H, d], conv1d, A_log, D and dt_bias [h].

    The time step is no tensor of its own: `layers.MINIMUM_BITS` keeps the whole in_proj at 8 bits or more. Where ranks
    do not divide the groups, the engine repeats groups with a loader that knows the plain weight but not its scales.
    """
    return (
        replace(linear(rf"{at}\.{path}\.in_proj", C.SSM_IN, aliases=aliases, shape="2*h*p+2*G*N+h, H"), groups=groups),
        linear(rf"{at}\.{path}\.out_proj", C.SSM_OUT, row_parallel=True, aliases=aliases, shape="H, h*p"),
        kept(rf"{at}\.{path}\.(?:in|out)_proj\.bias", C.STATE),
        kept(rf"{at}\.{path}\.conv1d\.(?:weight|bias)", C.SSM_CONV),
        kept(rf"{at}\.{path}\.(?:A_log|D|dt_bias)", C.SSM_DT),
        kept(rf"{at}\.{path}\.norm\.weight", C.NORM),
    )


def mamba1(at: str, path: str, *, aliases: tuple[str, ...] = ()) -> tuple[TensorRule, ...]:
    """in_proj [2*d, H], x_proj [r + 2*N, d] (gives dt, B, C), dt_proj [d, r], out_proj [H, d], A_log [d, N], D [d]."""
    return (
        linear(rf"{at}\.{path}\.in_proj", C.SSM_IN, aliases=aliases, plain=(PLAIN_MIXER,), shape="2*d, H"),
        linear(
            rf"{at}\.{path}\.out_proj",
            C.SSM_OUT,
            row_parallel=True,
            aliases=aliases,
            plain=(PLAIN_MIXER,),
            shape="H, d",
        ),
        kept(rf"{at}\.{path}\.(?:in|out)_proj\.bias", C.STATE),
        kept(rf"{at}\.{path}\.(?:x_proj\.weight|dt_proj\.(?:weight|bias)|A_log|D)", C.SSM_DT),
        kept(rf"{at}\.{path}\.conv1d\.(?:weight|bias)", C.SSM_CONV),
        kept(rf"{at}\.{path}\.(?:dt|b|c)_layernorm\.weight", C.NORM),
    )
