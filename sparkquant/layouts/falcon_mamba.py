"""Falcon-Mamba: Mamba-1 without attention. The engine takes none of it quantized: plans that try are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _mamba
from sparkquant.sizes import Sizes

MODEL_TYPES = ("falcon_mamba",)
ARCHITECTURES = ("FalconMambaForCausalLM",)


def sizes(config: Mapping[str, Any]) -> Sizes:
    """intermediate_size is the mixer's inner width."""
    return {"d": ("intermediate_size", config.get("intermediate_size"))}


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Falcon-Mamba checkpoint."""
    at = r"backbone\.layers\.\d+"
    return Layout(
        family="falcon_mamba",
        rules=(
            *d.top(r"backbone\.", embed="embeddings", norm="norm_f", plain_head=True),
            *_mamba.mamba1(at, "mixer"),
            *d.norms(at, "norm"),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(r"re:.*mixer\.(?:conv1d|x_proj|dt_proj)$", r"re:.*embeddings$"),
        tied_head=d.tied(config, default=True),
    )
