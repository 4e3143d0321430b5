"""LFM2, dense: short convolutions and attention; the head is tied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout
from sparkquant.layouts import _lfm2
from sparkquant.sizes import Sizes, even_heads

MODEL_TYPES = ("lfm2",)
ARCHITECTURES = ("Lfm2ForCausalLM",)


def tied(config: Mapping[str, Any]) -> bool:
    """Older configs spell the key `tie_embedding`; a silent config means tied."""
    return bool(config.get("tie_word_embeddings", config.get("tie_embedding", True)))


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Unless told not to, the model class makes MLPs narrower than intermediate_size."""
    fixed = config.get("block_auto_adjust_ff_dim") is False
    return {**even_heads(config), **({} if fixed else {"I": ("intermediate_size", None)})}


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a dense LFM2 checkpoint."""
    return Layout(
        family="lfm2",
        rules=_lfm2.decoder(r"model\.layers\.\d+"),
        mtp=NO_DRAFT_HEAD,
        ignore_always=_lfm2.IGNORE,
        tied_head=tied(config),
    )
