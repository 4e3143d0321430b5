"""Mamba-2 without attention, as Codestral-Mamba."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout, config_int
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _mamba
from sparkquant.sizes import Sizes

MODEL_TYPES = ("mamba2",)
ARCHITECTURES = ("Mamba2ForCausalLM",)


def sizes(config: Mapping[str, Any]) -> Sizes:
    """All heads are Mamba's."""
    return {"h": ("num_heads", config.get("num_heads")), "p": ("head_dim", config.get("head_dim"))}


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Mamba-2 checkpoint."""
    at = r"backbone\.layers\.\d+"
    return Layout(
        family="mamba2",
        rules=(
            *d.top(r"backbone\.", embed="embeddings", norm="norm_f", plain_head=True),
            *_mamba.mamba2(at, "mixer", config_int(config, "n_groups", 0)),
            *d.norms(at, "norm"),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(r"re:.*mixer\.conv1d$", r"re:.*embeddings$"),
        tied_head=d.tied(config),
    )
