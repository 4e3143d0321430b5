"""Qwen3.8-Flash-Next: the delta net of Qwen3.5, sparse attention with an indexer, hyper-connections, n-gram embedding.

The engine merges q, k and v with the indexer's projection, and builds lm_head without a quantization config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkquant.layers import LayerClass as C
from sparkquant.layers import Layout, Limit, MtpRule, TensorRule, config_int
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _qwen as q
from sparkquant.layouts.qwen3_5 import delta_net

MODEL_TYPES = ("qwen4_exp",)
ARCHITECTURES = ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM")

ABSENT = Limit(("0.25", "0.26"), "Qwen4ExpForConditionalGeneration came later")
MERGED = Limit(("0.33",), "merged with the indexer's index_qk_proj into qkv_proj, which stays 16-bit")
_PATH = r"model\.language_model\."
_MIXER = r"(?:hc_norm|input_mix_weight_down|input_mix_weight_up|block_inject_weight)\.weight"


def attention(at: str) -> tuple[TensorRule, ...]:
    """q [2*A*D, H] with the output gate, k, v, o, their norms, and the indexer."""
    path = rf"{at}\.self_attn"
    return (
        d.linear(rf"{path}\.[qkv]_proj", C.ATTENTION_QKV, "qkv_proj", plain=(MERGED,), shape="A*D|2*A*D|K*D, H"),
        d.linear(rf"{path}\.o_proj", C.ATTENTION_OUT, row_parallel=True, shape="H, A*D"),
        d.kept(rf"{path}\.[qk]_norm\.weight", C.NORM),
        d.kept(rf"{path}\.indexer\.index_qk_proj\.weight", C.ROUTER),
        d.kept(rf"{path}\.indexer\.[qk]_layernorm\.weight", C.NORM),
    )


def block(at: str) -> tuple[TensorRule, ...]:
    """What decoder layers and the draft layer have in common."""
    return (
        *q.moe(at),
        *attention(at),
        *q.shared_expert(at),
        *q.router(at),
        d.kept(rf"{at}\.(?:attn|mlp)_hyper_connection\.{_MIXER}", C.ADAPTER),
    )


def per_layer_embedding(at: str) -> tuple[TensorRule, ...]:
    """The n-gram table (in shards), its integer tables, and the path from it into the layer."""
    path = rf"{at}\.ple"
    return (
        d.kept(rf"{path}\.ple_embedding\.ngram_embedding\.(?:shard_\d+\.)?weight(?:_scale)?", C.EMBED, optional=True),
        d.kept(
            rf"{path}\.ple_embedding\.(?:layer_multipliers|ngram_heads_offsets|ngram_heads_vocab_sizes)",
            C.STATE,
            optional=True,
        ),
        d.kept(rf"{path}\.(?:key_proj|value_proj)\.weight", C.ADAPTER, optional=True),
        d.kept(rf"{path}\.conv1d\.weight", C.LINEAR_ATTENTION_CONV, optional=True),
        d.kept(rf"{path}\.(?:norm\w*|\w*norm)\.weight", C.NORM, optional=True),
    )


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Qwen4-Exp checkpoint."""
    text = d.text_config(config)
    at, draft = rf"{_PATH}layers\.\d+", r"mtp\.layers\.\d+"
    parts = config_int(text, "split_ngram_parts", 512)
    return Layout(
        family="qwen4_exp",
        rules=(
            *block(at),
            *delta_net(at),
            *per_layer_embedding(at),
            TensorRule(rf"{_PATH}embed_tokens\.weight", C.EMBED, required=True, shape="V, H"),
            d.kept(rf"{_PATH}hyper_connection_mixer\.{_MIXER}", C.ADAPTER),
            TensorRule(r"lm_head\.weight", C.LM_HEAD, linear=True, plain=(d.PLAIN_HEAD,), required=True, shape="V, H"),
            *q.vision(),
            *d.as_draft(block(draft)),
            d.kept(rf"mtp\.hyper_connection_mixer\.{_MIXER}", C.MTP),
            d.kept(r"mtp\.(?:fc_embedding|fc_hidden|pre_fc_norm_embedding|pre_fc_norm_hidden)\.weight", C.MTP),
        ),
        mtp=MtpRule(
            declared=bool(text.get("mtp_num_hidden_layers") or 0),
            config_key="mtp_num_hidden_layers",
            plain=(r"re:.*mtp\.(?:fc_embedding|fc_hidden)$", r"re:.*mtp\..*indexer\..*"),
        ),
        ignore_always=(
            *q.IGNORE,
            r"re:.*indexer\.index_qk_proj$",
            r"re:.*hyper_connection(?:_mixer)?\..*",
            r"re:.*ple\.(?:key_proj|value_proj|kv_proj)$",
            r"re:.*ngram_embedding.*",
        ),
        tied_head=d.tied(config),
        experts=(config_int(text, "num_experts", 0), config_int(text, "num_experts_per_tok", 0)),
        # A live model has the n-gram table in one piece; its shards are equally long.
        live_names=((r"(.*ngram_embedding)\.shard_(\d+)\.weight$", rf"\1.weight[\2/{parts}]"),),
        absent=(ABSENT,),
    )
