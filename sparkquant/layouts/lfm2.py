"""LFM2, dense: short convolutions and attention; the head is tied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout
from sparkquant.layouts import _lfm2

MODEL_TYPES = ("lfm2",)


def tied(config: Mapping[str, Any]) -> bool:
    """Older configs spell the key `tie_embedding`; a silent config means tied."""
    return bool(config.get("tie_word_embeddings", config.get("tie_embedding", True)))


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a dense LFM2 checkpoint."""
    return Layout(
        family="lfm2",
        rules=_lfm2.decoder(r"model\.layers\.\d+"),
        mtp=NO_DRAFT_HEAD,
        ignore_always=_lfm2.IGNORE,
        tied_head=tied(config),
    )
