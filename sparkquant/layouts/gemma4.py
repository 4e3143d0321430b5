"""Gemma 4: per-layer inputs, layers that share keys and values, experts beside the MLP, image and audio towers.

Quantized experts are looked for below `moe.experts`. The draft model is a checkpoint of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _gemma
from sparkquant.sizes import Sizes

MODEL_TYPES = ("gemma4", "gemma4_text")
ARCHITECTURES = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")

_PATH = r"model\.(?:language_model\.)?"
_ALIASES = (r"layers\.{n}\.moe\.experts",)


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Heads of full attention differ from those of sliding windows, and some MLPs may be twice as wide."""
    wide = d.text_config(config).get("use_double_wide_mlp")
    return {"D": ("head_dim", None), **({"I": ("intermediate_size", None)} if wide else {})}


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Gemma-4 checkpoint, multimodal or text-only."""
    text = d.text_config(config)
    at = rf"{_PATH}layers\.\d+"
    return Layout(
        family="gemma4",
        rules=(
            *d.experts(at, "experts", aliases=_ALIASES),
            *d.stacked_experts(at, "experts", aliases=_ALIASES),
            *d.top(_PATH),
            *d.attention(at, qk_norms="[qk]_norm", shared_kv=True),
            *d.mlp(at),
            *_gemma.per_layer_input(_PATH, at),
            d.kept(rf"{at}\.router\.(?:proj\.weight|scale|per_expert_scale)", C.ROUTER),
            d.kept(rf"{at}\.layer_scalar", C.STATE),
            d.kept(r"model\.(?:vision_tower|embed_vision)\..+", C.VISION),
            d.kept(r"model\.(?:audio_tower|embed_audio)\..+", C.AUDIO),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(
            *_gemma.IGNORE,
            r"re:.*router\.proj$",
            r"re:.*(?:vision_tower|embed_vision)\..*",
            r"re:.*(?:audio_tower|embed_audio)\..*",
        ),
        tied_head=d.tied(config, default=True),
        # Dense sizes write null here.
        experts=(int(text.get("num_experts") or 0), int(text.get("top_k_experts") or 0)),
        live_names=((r"^model\.language_model\.", "model."),),
    )
