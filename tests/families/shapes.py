"""Names and shapes of every family but the Qwen hybrids, computed from a config of the published form."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.data.shapes import Shapes
from tests.families import shapes_gemma as gemma
from tests.families import shapes_latent as latent
from tests.families import shapes_linear as linear
from tests.families import shapes_mamba as mamba
from tests.families.parts import Config

SHAPES: Mapping[str, Callable[[Config], Shapes]] = {
    "qwen4_exp": linear.qwen4_exp,
    "kimi_linear": latent.kimi_linear,
    "glm5_next": latent.glm5_next,
    "nemotron_h": mamba.nemotron_h,
    "granitemoehybrid": mamba.granitemoehybrid,
    "falcon_h1": mamba.falcon_h1,
    "bamba": mamba.bamba,
    "jamba": mamba.jamba,
    "zamba2": mamba.zamba2,
    "lfm2": linear.lfm2,
    "lfm2_moe": linear.lfm2,
    "minimax": linear.minimax,
    "minimax_m2": linear.minimax_m2,
    "olmo_hybrid": linear.olmo_hybrid,
    "recurrent_gemma": linear.recurrent_gemma,
    "mamba2": mamba.mamba2_model,
    "falcon_mamba": mamba.falcon_mamba,
    "deepseek_v3": latent.deepseek_v3,
    "glm4_moe": latent.glm4_moe,
    "glm_moe_dsa": latent.glm_moe_dsa,
    "mistral3": latent.mistral4,
    "gemma3n_text": gemma.gemma3n_text,
    "gemma4": gemma.gemma4,
}
"""By `model_type` of config.json."""


def shapes_of(config: Config) -> Shapes:
    """Every tensor of the file that a config describes."""
    return SHAPES[config["model_type"]](config)
