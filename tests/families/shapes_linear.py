"""Models with other recurrences or short convolutions: Qwen4-Exp, LFM2, MiniMax, OLMo hybrid, RecurrentGemma."""

from __future__ import annotations

from tests.data.shapes import Shapes, delta_net, layer_types, vision
from tests.data.shapes import moe as qwen_moe
from tests.families.parts import Config, below, gated, gqa, norms, routed, top

NGRAM_ROWS = 296
"""Rows of the n-gram table of the small config: the library sums primes and rounds up."""


def _qwen4_block(at: str, text: Config) -> Shapes:
    """Attention with indexer, experts and two hyper-connections: a decoder layer without its delta net."""
    hidden, streams, low = text["hidden_size"], text["hc_count"], text["hc_lowrank"]
    index = {
        "index_qk_proj.weight": (
            (text["indexer_n_heads"] + text["indexer_kv_heads"]) * text["indexer_head_dim"], hidden
        ),
        "q_layernorm.weight": (text["indexer_head_dim"],), "k_layernorm.weight": (text["indexer_head_dim"],),
    }  # fmt: skip
    shapes = gqa(f"{at}.self_attn", text, qk="?_norm")
    rows, columns = shapes[f"{at}.self_attn.q_proj.weight"]
    shapes[f"{at}.self_attn.q_proj.weight"] = (2 * rows, columns)
    shapes |= below(f"{at}.self_attn.indexer", index)
    return shapes | _qwen4_mlp(at, text, hidden, streams, low)


def _qwen4_mlp(at: str, text: Config, hidden: int, streams: int, low: int) -> Shapes:
    shapes = qwen_moe(at, text, fused=True)
    for part in ("attn", "mlp"):
        mixer = _hc_mixer(hidden, streams, low) | {"block_inject_weight.weight": (streams, streams * hidden)}
        shapes |= below(f"{at}.{part}_hyper_connection", mixer)
    return shapes


def _hc_mixer(hidden: int, streams: int, low: int) -> Shapes:
    return {
        "hc_norm.weight": (streams * hidden,),
        "input_mix_weight_down.weight": (low, streams * hidden),
        "input_mix_weight_up.weight": (streams * hidden, low),
    }


def qwen4_exp(config: Config) -> Shapes:
    """Qwen3.8-Flash-Next."""
    text, path = config["text_config"], "model.language_model."
    hidden, streams, low = text["hidden_size"], text["hc_count"], text["hc_lowrank"]
    shapes: Shapes = {
        f"{path}embed_tokens.weight": (text["vocab_size"], hidden), "lm_head.weight": (text["vocab_size"], hidden)
    }  # fmt: skip
    shapes |= below(f"{path}hyper_connection_mixer", _hc_mixer(hidden, streams, low))
    for index, kind in enumerate(layer_types(text)):
        at = f"{path}layers.{index}"
        if kind == "linear_attention":
            shapes |= delta_net(at, text, split=True) | _qwen4_mlp(at, text, hidden, streams, low)
        else:
            shapes |= _qwen4_block(at, text)
        if index + 1 in text["ple_layer_ids"]:
            shapes |= below(f"{at}.ple", _ngram(text))
    draft: Shapes = {
        "fc_embedding.weight": (hidden, hidden), "fc_hidden.weight": (hidden, hidden),
        "pre_fc_norm_embedding.weight": (hidden,), "pre_fc_norm_hidden.weight": (streams * hidden,),
    }  # fmt: skip
    if text.get("mtp_num_hidden_layers"):
        shapes |= below("mtp", draft) | _qwen4_block("mtp.layers.0", text)
        shapes |= below("mtp.hyper_connection_mixer", _hc_mixer(hidden, streams, low))
    return shapes | vision(config["vision_config"])


def _ngram(text: Config) -> Shapes:
    hidden, streams, width = text["hidden_size"], text["hc_count"], text["ple_embed_dim"]
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    parts = text["split_ngram_parts"]
    shapes: Shapes = {
        f"ple_embedding.ngram_embedding.shard_{i}.weight": (NGRAM_ROWS // parts, width // heads) for i in range(parts)
    }
    norms = {f"norm_{name}.weight": (streams * hidden,) for name in ("conv", "key", "query")}
    return shapes | norms | {
        "ple_embedding.layer_multipliers": (text["ngram_size"],), "ple_embedding.ngram_heads_offsets": (heads,),
        "ple_embedding.ngram_heads_vocab_sizes": (heads,), "key_proj.weight": (streams * hidden, width),
        "value_proj.weight": (hidden, width), "conv1d.weight": (streams * hidden, 1, text["ple_conv_kernel_size"]),
    }  # fmt: skip


def lfm2(config: Config) -> Shapes:
    """LFM2, dense or with experts."""
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    shapes = top(config, "model.", norm="embedding_norm", tied=True)
    for index, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{index}"
        if kind == "conv":
            conv: Shapes = {
                "in_proj.weight": (3 * hidden, hidden), "out_proj.weight": (hidden, hidden),
                "conv.weight": (hidden, 1, config["conv_L_cache"]),
            }  # fmt: skip
            shapes |= below(f"{at}.conv", conv)
        else:
            shapes |= gqa(f"{at}.self_attn", config, out="out_proj", qk="?_layernorm")
        ff = f"{at}.feed_forward"
        if experts and index >= config["num_dense_layers"]:
            shapes |= routed(f"{ff}.experts", experts, hidden, config["moe_intermediate_size"], "w1", "w3", "w2")
            shapes |= {f"{ff}.gate.weight": (experts, hidden), f"{ff}.expert_bias": (experts,)}
        else:
            shapes |= gated(ff, hidden, config["intermediate_size"], ("w1", "w3", "w2"))
        shapes |= norms(at, hidden, "operator_norm", "ffn_norm")
    return shapes


def minimax(config: Config) -> Shapes:
    """MiniMax-Text-01, decay tables included."""
    hidden, experts, inner = config["hidden_size"], config["num_local_experts"], config["intermediate_size"]
    heads, width, block = config["num_attention_heads"], config["head_dim"], config["block_size"]
    shapes = top(config, "model.", tied=False)
    for index, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{index}"
        if kind == "full_attention":
            shapes |= gqa(f"{at}.self_attn", config)
        else:
            rows = heads * width
            lightning: Shapes = {
                "qkv_proj.weight": (3 * rows, hidden), "output_gate.weight": (rows, hidden),
                "out_proj.weight": (hidden, rows), "norm.weight": (rows,), "slope_rate": (heads, 1, 1),
                "query_decay": (heads, block, 1), "key_decay": (heads, block, 1),
                "diagonal_decay": (1, heads, block, block),
            }  # fmt: skip
            shapes |= below(f"{at}.self_attn", lightning)
        shapes |= routed(f"{at}.block_sparse_moe.experts", experts, hidden, inner, "w1", "w3", "w2")
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (experts, hidden)
        shapes |= norms(at, hidden, "input_layernorm", "post_attention_layernorm")
    return shapes


def minimax_m2(config: Config) -> Shapes:
    """MiniMax-M2."""
    hidden, experts, inner = config["hidden_size"], config["num_local_experts"], config["intermediate_size"]
    shapes = top(config, "model.", tied=False)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        moe = f"{at}.block_sparse_moe"
        shapes |= gqa(f"{at}.self_attn", config, qk="?_norm", full=True)
        shapes |= routed(f"{moe}.experts", experts, hidden, inner, "w1", "w3", "w2")
        shapes |= {f"{moe}.gate.weight": (experts, hidden), f"{moe}.e_score_correction_bias": (experts,)}
        shapes |= norms(at, hidden, "input_layernorm", "post_attention_layernorm")
    return shapes


def olmo_hybrid(config: Config) -> Shapes:
    """OLMo hybrid."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    shapes = top(config, "model.", tied=False)
    for index, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{index}"
        shapes |= gated(f"{at}.mlp", hidden, inner)
        if kind == "full_attention":
            shapes |= gqa(f"{at}.self_attn", config, qk="?_norm", full=True)
            shapes |= norms(at, hidden, "post_feedforward_layernorm", "feedforward_layer_norm")
            continue
        heads, kernel = config["linear_num_value_heads"], config["linear_conv_kernel_dim"]
        rows = {"q": key, "k": key, "v": value}
        net: Shapes = {f"{part}_proj.weight": (n, hidden) for part, n in {**rows, "g": value}.items()}
        net |= {f"{part}_conv1d.weight": (n, 1, kernel) for part, n in rows.items()}
        net |= {"a_proj.weight": (heads, hidden), "b_proj.weight": (heads, hidden), "A_log": (heads,)}
        net |= {"dt_bias": (heads,), "o_norm.weight": (config["linear_value_head_dim"],)}
        shapes |= below(f"{at}.linear_attn", net | {"o_proj.weight": (hidden, value)})
        shapes |= norms(at, hidden, "attention_layer_norm", "feedforward_layer_norm")
    return shapes


def recurrent_gemma(config: Config) -> Shapes:
    """RecurrentGemma; its MLPs are half of intermediate_size wide."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"] // 2, config["lru_width"]
    heads = config["num_attention_heads"]
    block = width // heads
    shapes = top(config, "model.", norm="final_norm", tied=True)
    for index, kind in enumerate(config["block_types"]):
        at = f"model.layers.{index}"
        shapes |= gated(f"{at}.mlp_block", hidden, inner)
        shapes |= {f"{at}.mlp_block.{name}.bias": (inner,) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{at}.mlp_block.down_proj.bias": (hidden,)}
        shapes |= norms(at, hidden, "temporal_pre_norm", "channel_pre_norm")
        if kind == "attention":
            shapes |= gqa(f"{at}.temporal_block", config) | {f"{at}.temporal_block.o_proj.bias": (hidden,)}
            continue
        lru: Shapes = {f"linear_{part}.weight": (width, hidden) for part in "xy"}
        lru |= {f"linear_{part}.bias": (width,) for part in "xy"}
        lru |= {"linear_out.weight": (hidden, width), "linear_out.bias": (hidden,), "conv_1d.bias": (width,)}
        lru |= {"conv_1d.weight": (width, 1, config["conv1d_width"]), "rg_lru.recurrent_param": (width,)}
        for gate in ("input", "recurrent"):
            lru |= {f"rg_lru.{gate}_gate_weight": (heads, block, block), f"rg_lru.{gate}_gate_bias": (heads, block)}
        shapes |= below(f"{at}.temporal_block", lru)
    return shapes
