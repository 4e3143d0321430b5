"""Mistral Small 4 in its Hugging Face form: latent attention and experts inside the multimodal Mistral-3 class.

Other models of `model_type` mistral3 are plain dense transformers: they have no layout here. No supported engine
version was found to map this form's text part to a model class; it reads the release's own consolidated file instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.errors import UnknownFamily
from sparkquant.layers import ENGINES, NO_DRAFT_HEAD, Layout, Limit, config_int
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _mla
from sparkquant.sizes import Sizes, whole

MODEL_TYPES = ("mistral4", "mistral3")
ARCHITECTURES = ("Mistral3ForConditionalGeneration", "Mistral4ForCausalLM")

ABSENT = Limit(ENGINES, "no model class is registered for a text part of model_type mistral4")
_PATH = r"(?:language_model\.)?model\."


def sizes(config: Mapping[str, Any]) -> Sizes:
    """All shared experts together are one MLP."""
    return {
        "Is": ("n_shared_experts * moe_intermediate_size", whole(config, "n_shared_experts", "moe_intermediate_size"))
    }


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Mistral-4 checkpoint; experts stacked or one by one."""
    text = d.text_config(config)
    if text is not config and text.get("model_type") != "mistral4":
        raise UnknownFamily(
            f"a mistral3 model whose text part is {text.get('model_type')!r} has no layout",
            hint="of this model class only Mistral 4 (text_config.model_type mistral4) is a hybrid",
        )
    at = rf"{_PATH}layers\.\d+"
    return Layout(
        family="mistral4",
        rules=(
            *_mla.mixture(at),
            *d.stacked_experts(at, r"mlp\.experts"),
            *_mla.mla(at),
            *d.top(_PATH, head=r"(?:language_model\.)?lm_head"),
            d.kept(r"(?:vision_tower|multi_modal_projector)\..+", C.VISION),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(*_mla.IGNORE, r"re:.*vision_tower\..*", r"re:.*multi_modal_projector\..*"),
        tied_head=d.tied(config, default=text is not config),
        experts=(config_int(text, "n_routed_experts", 0), config_int(text, "num_experts_per_tok", 0)),
        live_names=(
            (r"^language_model\.lm_head\.", "lm_head."),
            (r"^language_model\.model\.", "model.language_model."),
            (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
        ),
        absent=(ABSENT,),
    )
