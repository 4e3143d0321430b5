"""Draft heads that are stored as layers behind the last one (NextN): the layer's number tells, not its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparkquant.layers import LayerClass as C
from sparkquant.layers import MtpRule, TensorRule
from sparkquant.layouts._decoder import as_draft, kept
from sparkquant.layouts._indices import at_least, below

KEY = "num_nextn_predict_layers"


def decoder_and_draft(path: str, layers: int, block: Callable[[str], tuple[TensorRule, ...]]) -> tuple[TensorRule, ...]:
    """The rules of a block, once for the decoder's layers and once for those behind them."""
    behind = rf"{path}layers\.{at_least(layers)}"
    return (*block(rf"{path}layers\.{below(layers)}"), *as_draft(block(behind)), *own(behind))


def own(at: str) -> tuple[TensorRule, ...]:
    """What only a draft layer has: eh_proj [H, 2*H], three norms, and in some releases embedding and head copies."""
    return (kept(rf"{at}\.(?:enorm|hnorm|eh_proj|embed_tokens|shared_head\.norm|shared_head\.head)\.weight", C.MTP),)


def rule(text: Mapping[str, Any], layers: int) -> MtpRule:
    """The draft head's declaration and region."""
    return MtpRule(
        declared=bool(text.get(KEY) or 0),
        config_key=KEY,
        region=rf"layers\.{at_least(layers)}\.",
        plain=(r"re:.*eh_proj$", r"re:.*shared_head\.head$"),
        by_index=True,
    )
