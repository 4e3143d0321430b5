"""How each model class of vLLM names its modules, per family and version: what is fused, renamed, or built plainly.

Read in the model files of the versions in `rules.VERSIONS`; a family that is not here has what nearly all share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkquant.engine.rules import EngineModel

_Fused = Mapping[str, tuple[str, ...]]
_QKV: _Fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
_GATE_UP: _Fused = {"gate_up_proj": ("gate_proj", "up_proj")}
_USUAL: _Fused = {**_QKV, **_GATE_UP}
_DELTA_NET: _Fused = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
_LATENT: _Fused = {"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}
_MULTIMODAL = (
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", "language_model.model."),
)
_PLAIN = (
    r".*\.mlp\.(?:gate|shared_expert_gate)|.*conv1d|.*\.embed_tokens|.*norm\w*|.*\.(?:A_log|dt_bias)"
    r"|.*visual\.(?:patch_embed\.proj|pos_embed)"
)
_ROUTERS = r".*\.(?:gate|router|router\.layer|router\.proj)"
_NEXTN = r".*eh_proj|.*layers\.\d+\.embed_tokens"
_HEAD = "lm_head"
_W = ("w1", "w3", "w2")


def _model(fused: _Fused = _USUAL, renames: tuple[tuple[str, str], ...] = (), *plain: str, **more: Any) -> EngineModel:
    return EngineModel(fused, renames, re.compile("|".join((_PLAIN, *plain))), **more)


GENERIC = _model()
"""For a family whose class was not read."""

_TEXT = _model({**_USUAL, **_DELTA_NET})
_VL = _model({**_USUAL, **_DELTA_NET}, _MULTIMODAL)
_NEW_TEXT = replace(_TEXT, renames=(("model.language_model.", "model."),))
_DEEPSEEK = _model({**_GATE_UP, **_LATENT}, (), _NEXTN, r".*indexer\.(?:wk|weights_proj)")
_QWEN4 = _model(
    {**_USUAL, "qkv_proj": (*_QKV["qkv_proj"], "indexer.index_qk_proj"), **_DELTA_NET,
     "kv_proj": ("key_proj", "value_proj")},
    _MULTIMODAL, r".*hyper_connection.*", _HEAD, r".*ngram.*", r".*visual.*embed.*",
)  # fmt: skip
_GLM5_NEXT = _model(_GATE_UP, _MULTIMODAL, _ROUTERS, r".*self_attn.*", r".*visual.*", _NEXTN, r".*\.hc_.*")
_GEMMA4 = _model(
    _USUAL, (*_MULTIMODAL, ("model.", "")), _ROUTERS, r".*patch_embedder.*", asked=((r"\.experts", ".moe.experts"),)
)
_MINIMAX_M2 = _model(_QKV, (), _ROUTERS, asked=((r"\.block_sparse_moe\.", ".mlp."),))
_OLMO = _model(
    {"in_proj_qkvg": ("q_proj", "k_proj", "v_proj", "g_proj"), **_USUAL},
    where={"in_proj_qkvg": r".*linear_attn", "qkv_proj": r".*self_attn"},
)
_JAMBA = _model(
    _USUAL, (), _ROUTERS, r".*\.mamba\..*", _HEAD, asked=((r"\.self_attn\.", "."), (r"\.mamba\.", ".mixer."))
)
_GRANITE = _model(
    _QKV, (), _ROUTERS,
    asked=((r"\.mamba\.", ".mixer."), (r"block_sparse_moe\.(?:in|out)put_linear$", "block_sparse_moe.experts")),
)  # fmt: skip

MODELS: Mapping[str, EngineModel] = {
    "qwen3_next": GENERIC,
    "qwen3_5": _VL,
    "qwen3_5_moe": _VL,
    "qwen3_5_text": _TEXT,
    "qwen3_5_moe_text": _TEXT,
    "qwen4_exp": _QWEN4,
    "glm5_next": _GLM5_NEXT,
    "deepseek_v3": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "glm4_moe": _model(_USUAL, (), _NEXTN),
    "mistral3": _model({**_GATE_UP, **_LATENT}, (), r".*(?:vision_tower|multi_modal_projector).*"),
    "kimi_linear": _model({}, (), _ROUTERS, opaque=_GATE_UP),
    "nemotron_h": _model(_QKV, (("backbone.", "model."),), _ROUTERS),
    "granitemoehybrid": _GRANITE,
    "jamba": _JAMBA,
    "lfm2": _model({**_QKV, "w13": ("w1", "w3")}, (), r".*\.conv\.\w+"),
    "lfm2_moe": _model({**_QKV, "w13": ("w1", "w3")}, (), r".*\.conv\.\w+"),
    "minimax_m2": _MINIMAX_M2,
    "olmo_hybrid": _OLMO,
    "mamba2": _model({}, (), _HEAD),
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
}
"""By `model_type` of config.json. Qwen3-Next stores in_proj_qkvz and in_proj_ba fused already: no shards there."""


def model_of(config: Mapping[str, Any], version: str) -> EngineModel:
    """The engine's naming of a model in one version."""
    model_type = config.get("model_type")
    found = MODELS.get(model_type, GENERIC) if isinstance(model_type, str) else GENERIC
    if model_type == "qwen4_exp":  # draft layers are numbered on from the last layer of the model
        last = _count(_text(config), "num_hidden_layers")
        draft = tuple((f"mtp.layers.{number}.", f"mtp.layers.{last + number}.") for number in range(4))
        found = replace(found, renames=(*found.renames, *draft))
    elif model_type == "falcon_h1":
        found = _falcon_h1(_count(config, "num_hidden_layers"))
    elif "fused_qkv_a_proj" in found.fused and not _text(config).get("q_lora_rank"):
        found = replace(found, fused=_GATE_UP)  # queries have one projection, keys' first one is alone
    elif model_type == "zamba2":
        kinds = config.get("layers_block_type")
        found = _zamba2(kinds.count("hybrid") if isinstance(kinds, list) else len(_listed(config, "hybrid_layer_ids")))
    return _newer(model_type, found, config) if version == "0.33" else found


def _newer(model_type: Any, older: EngineModel, config: Mapping[str, Any]) -> EngineModel:
    """What 0.33 names differently."""
    if model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        return _NEW_TEXT
    if model_type == "kimi_linear":
        merged = {"in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj")}
        net = config.get("linear_attn_config")
        layers = [n - 1 for n in _listed(net if isinstance(net, Mapping) else {}, "kda_layers") if type(n) is int]
        where = {"in_proj_qkvgfab": rf".*layers\.(?:{'|'.join(map(str, layers)) or '(?!)'})\.self_attn"}
        return replace(older, fused={**_GATE_UP, **merged}, opaque={}, where=where)
    if model_type == "nemotron_h":
        return replace(older, experts=("up_proj", "None", "down_proj"))
    if model_type in ("lfm2", "lfm2_moe"):
        plain = re.compile("|".join((_PLAIN, r".*\.conv\.conv")))
        return replace(older, unquantized=plain, asked=((r"\.conv\.", ".short_conv."),), experts=_W)
    return replace(older, experts=_W) if model_type == "minimax_m2" else older


def _falcon_h1(layers: int) -> EngineModel:
    """Mixers are counted on from the number of layers."""
    asked = ((r"\.self_attn\.", "."), (r"\.layers\.(\d+)\.mamba\.", rf".{{{layers}+\1}}.mixer."))
    return _model(_USUAL, (), _HEAD, asked=asked)


def _zamba2(hybrids: int) -> EngineModel:
    """A shared block is asked about as `model.qkv_proj`, mixers are counted on from the number of hybrid layers."""
    asked = (
        (r"^model\.layers\.\d+\.shared_transformer\.(?:self_attn\.)?", "model."),
        (r"^model\.layers\.(\d+)\.(?:mamba_decoder\.)?mamba\.", rf"{{{hybrids}+\1}}.mixer."),
        (r"^model\.layers\.(\d+)\.linear", rf"{{{hybrids}+\1}}.linear"),
    )
    return _model({}, (), _HEAD, r".*adapter_list.*", asked=asked, opaque=_QKV)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if type(value) is int and 0 <= value < 10_000 else 0


def _listed(config: Mapping[str, Any], key: str) -> list[Any]:
    value = config.get(key)
    return value if isinstance(value, list) and len(value) < 10_000 else []
