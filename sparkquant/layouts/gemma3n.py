"""Gemma 3n: per-layer inputs, AltUp and LAuReL side paths, layers that share keys and values, two towers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _gemma

MODEL_TYPES = ("gemma3n", "gemma3n_text")
ARCHITECTURES = ("Gemma3nForConditionalGeneration", "Gemma3nForCausalLM")

_PATH = r"model\.(?:language_model\.)?"


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Gemma-3n checkpoint, multimodal or text-only."""
    at = rf"{_PATH}layers\.\d+"
    return Layout(
        family="gemma3n",
        rules=(
            *d.top(_PATH),
            *d.attention(at, qk_norms="[qk]_norm", shared_kv=True),
            *d.mlp(at),
            *_gemma.per_layer_input(_PATH, at),
            d.kept(rf"{_PATH}altup_(?:projections|unembed_projections)\.\d+\.weight", C.ADAPTER),
            d.kept(rf"{at}\.altup\..+", C.ADAPTER),
            d.kept(rf"{at}\.laurel\.linear_(?:left|right)\.weight", C.ADAPTER),
            d.kept(rf"{at}\.laurel\.post_laurel_norm\.weight", C.NORM),
            d.kept(r"model\.(?:vision_tower|embed_vision)\..+", C.VISION),
            d.kept(r"model\.(?:audio_tower|embed_audio)\..+", C.AUDIO),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(
            *_gemma.IGNORE,
            r"re:.*altup.*",
            r"re:.*laurel\..*",
            r"re:.*(?:vision_tower|embed_vision)\..*",
            r"re:.*(?:audio_tower|embed_audio)\..*",
        ),
        tied_head=d.tied(config, default=True),
        live_names=((r"^model\.language_model\.", "model."),),
    )
