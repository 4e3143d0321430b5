"""Names and shapes of checkpoints computed from their configs, for every family but the Qwen hybrids.

Written from model cards and model code, not from the layouts: what a layout calls a tensor is checked against these
names, and the sums are checked against the library's own model classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.data.shapes import Shapes, delta_net, layer_types, vision
from tests.data.shapes import moe as qwen_moe

Config = Mapping[str, Any]


def _below(at: str, parts: Mapping[str, tuple[int, ...]]) -> Shapes:
    return {f"{at}.{name}": shape for name, shape in parts.items()}


def _norms(at: str, hidden: int, *names: str) -> Shapes:
    return {f"{at}.{name}.weight": (hidden,) for name in names}


def _top(
    config: Config, path: str, *, embed: str = "embed_tokens", norm: str = "norm", head: str = "lm_head", tied: bool
) -> Shapes:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {f"{path}{embed}.weight": (vocab, hidden), f"{path}{norm}.weight": (hidden,)}
    return shapes if tied else {**shapes, f"{head}.weight": (vocab, hidden)}


def gqa(
    at: str, config: Config, *, out: str = "o_proj", qk: str = "", bias: str = "", full: bool = False, width: int = 0
) -> Shapes:
    """q, k, v, out; `qk` names the two norms, one head wide or (`full`) all heads wide; `bias` the biased ones."""
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head = width or config.get("head_dim") or hidden // heads
    rows = {"q": heads * head, "k": kv * head, "v": kv * head}
    parts: Shapes = {f"{part}_proj.weight": (n, hidden) for part, n in rows.items()}
    parts[f"{out}.weight"] = (hidden, heads * head)
    parts |= {f"{part}_proj.bias": (rows[part],) for part in bias}
    if qk:
        parts |= {qk.replace("?", part) + ".weight": (rows[part] if full else head,) for part in "qk"}
    return _below(at, parts)


def gated(at: str, hidden: int, inner: int, names: Iterable[str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    """Gated MLP."""
    gate, up, down = names
    shapes = {f"{gate}.weight": (inner, hidden), f"{up}.weight": (inner, hidden), f"{down}.weight": (hidden, inner)}
    return _below(at, shapes)


def routed(at: str, experts: int, hidden: int, inner: int, *names: str) -> Shapes:
    """Experts one by one."""
    shapes: Shapes = {}
    for expert in range(experts):
        shapes |= gated(f"{at}.{expert}", hidden, inner, names or ("gate_proj", "up_proj", "down_proj"))
    return shapes


def mamba2(at: str, hidden: int, heads: int, head: int, groups: int, state: int, *, norm: bool = True) -> Shapes:
    """z, x, B, C and dt in one projection; a convolution over x, B and C."""
    inner = heads * head
    channels = inner + 2 * groups * state
    shapes: Shapes = {
        "in_proj.weight": (inner + channels + heads, hidden), "out_proj.weight": (hidden, inner),
        "conv1d.weight": (channels, 1, 4), "conv1d.bias": (channels,), "A_log": (heads,), "D": (heads,),
        "dt_bias": (heads,),
    }  # fmt: skip
    return _below(at, shapes | ({"norm.weight": (inner,)} if norm else {}))


def mamba1(at: str, hidden: int, inner: int, rank: int, state: int, *, norms: bool) -> Shapes:
    """x and z in one projection; dt, B and C from x."""
    shapes: Shapes = {
        "in_proj.weight": (2 * inner, hidden), "x_proj.weight": (rank + 2 * state, inner),
        "dt_proj.weight": (inner, rank), "dt_proj.bias": (inner,), "out_proj.weight": (hidden, inner),
        "conv1d.weight": (inner, 1, 4), "conv1d.bias": (inner,), "A_log": (inner, state), "D": (inner,),
    }  # fmt: skip
    more = {"dt_layernorm.weight": (rank,), "b_layernorm.weight": (state,), "c_layernorm.weight": (state,)}
    return _below(at, shapes | (more if norms else {}))


def mla(at: str, config: Config) -> Shapes:
    """Latent attention, with or without a rank for queries."""
    hidden, heads, rank, kv = (
        config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"], config["kv_lora_rank"]
    )  # fmt: skip
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query: Shapes = {"q_proj.weight": (heads * (nope + rope), hidden)}
    if rank:
        query = {
            "q_a_proj.weight": (rank, hidden), "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (heads * (nope + rope), rank),
        }  # fmt: skip
    rest: Shapes = {
        "kv_a_proj_with_mqa.weight": (kv + rope, hidden), "kv_a_layernorm.weight": (kv,),
        "kv_b_proj.weight": (heads * (nope + value), kv), "o_proj.weight": (hidden, heads * value),
    }  # fmt: skip
    return _below(at, query | rest)


def indexer(at: str, config: Config) -> Shapes:
    """Sparse attention: queries from the latent, one key, a weight per head."""
    heads, width = config["index_n_heads"], config["index_head_dim"]
    shapes: Shapes = {
        "wq_b.weight": (heads * width, config["q_lora_rank"]), "wk.weight": (width, config["hidden_size"]),
        "weights_proj.weight": (heads, config["hidden_size"]), "k_norm.weight": (width,), "k_norm.bias": (width,),
    }  # fmt: skip
    return _below(f"{at}.indexer", shapes)


def mixture(at: str, config: Config, *, dense: bool) -> Shapes:
    """MLP of the DeepSeek line: dense in the first layers, else router, experts and shared experts."""
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    if dense:
        return gated(f"{at}.mlp", hidden, config["intermediate_size"])
    return {
        f"{at}.mlp.gate.weight": (experts, hidden),
        f"{at}.mlp.gate.e_score_correction_bias": (experts,),
        **routed(f"{at}.mlp.experts", experts, hidden, inner),
        **gated(f"{at}.mlp.shared_experts", hidden, inner * config["n_shared_experts"]),
    }


def _nextn(at: str, config: Config, *, own: bool) -> Shapes:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {
        "enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
    }  # fmt: skip
    copies: Shapes = {"embed_tokens.weight": (vocab, hidden), "shared_head.head.weight": (vocab, hidden)}
    return _below(at, shapes | (copies if own else {}))


def _deepseek_like(config: Config, attend: Callable[[str], Shapes]) -> Shapes:
    layers, drafts = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    kinds = config.get("mlp_layer_types")
    shapes = _top(config, "model.", tied=False)
    for index in range(layers + drafts):
        at = f"model.layers.{index}"
        first = index < config["first_k_dense_replace"]
        dense = kinds[index] == "dense" if kinds and index < layers else first and index < layers
        shapes |= mixture(at, config, dense=dense) | attend(f"{at}.self_attn")
        shapes |= _norms(at, config["hidden_size"], "input_layernorm", "post_attention_layernorm")
        if index >= layers:
            shapes |= _nextn(at, config, own=True)
    return shapes


def deepseek_v3(config: Config) -> Shapes:
    """DeepSeek V3."""
    return _deepseek_like(config, lambda at: mla(at, config))


def glm4_moe(config: Config) -> Shapes:
    """GLM-4.5."""
    qk = "?_norm" if config["use_qk_norm"] else ""
    return _deepseek_like(config, lambda at: gqa(at, config, qk=qk, bias="qkv" if config["attention_bias"] else ""))


def glm_moe_dsa(config: Config) -> Shapes:
    """GLM-5."""
    return _deepseek_like(config, lambda at: mla(at, config) | indexer(at, config))


def mistral4(config: Config) -> Shapes:
    """Mistral Small 4 inside the multimodal class; experts stacked."""
    text, path = config["text_config"], "language_model.model."
    shapes = _top(text, path, head="language_model.lm_head", tied=False)
    for index in range(text["num_hidden_layers"]):
        at = f"{path}layers.{index}"
        found = mixture(at, text, dense=index < text["first_k_dense_replace"])
        if f"{at}.mlp.gate.weight" in found:
            found = {k: v for k, v in found.items() if ".experts." not in k and not k.endswith("correction_bias")}
            experts, inner = text["n_routed_experts"], text["moe_intermediate_size"]
            found[f"{at}.mlp.experts.gate_up_proj"] = (experts, 2 * inner, text["hidden_size"])
            found[f"{at}.mlp.experts.down_proj"] = (experts, text["hidden_size"], inner)
        shapes |= found | mla(f"{at}.self_attn", text)
        shapes |= _norms(at, text["hidden_size"], "input_layernorm", "post_attention_layernorm")
    return shapes | _pixtral(config)


def _pixtral(config: Config) -> Shapes:
    tower, out = config["vision_config"], config["text_config"]["hidden_size"]
    width, inner, patch = tower["hidden_size"], tower["intermediate_size"], tower["patch_size"]
    shapes: Shapes = {
        "vision_tower.patch_conv.weight": (width, 3, patch, patch),
        "vision_tower.ln_pre.weight": (width,),
        "multi_modal_projector.norm.weight": (width,),
        "multi_modal_projector.patch_merger.merging_layer.weight": (width, width * config["spatial_merge_size"] ** 2),
        "multi_modal_projector.linear_1.weight": (out, width),
        "multi_modal_projector.linear_2.weight": (out, out),
    }
    for index in range(tower["num_hidden_layers"]):
        at = f"vision_tower.transformer.layers.{index}"
        shapes |= {f"{at}.attention.{part}_proj.weight": (width, width) for part in "qkvo"}
        shapes |= gated(f"{at}.feed_forward", width, inner) | _norms(at, width, "attention_norm", "ffn_norm")
    return shapes


def kda(at: str, hidden: int, heads: int, width: int, kernel: int, *, flat: bool) -> Shapes:
    """Kimi delta attention; A_log is [1, 1, h, 1] or (`flat`) [h]."""
    rows = heads * width
    shapes: Shapes = {f"{part}_proj.weight": (rows, hidden) for part in "qkv"}
    shapes |= {f"{part}_conv1d.weight": (rows, 1, kernel) for part in "qkv"}
    shapes |= {
        "b_proj.weight": (heads, hidden), "f_a_proj.weight": (width, hidden), "f_b_proj.weight": (rows, width),
        "g_a_proj.weight": (width, hidden), "g_b_proj.weight": (rows, width), "dt_bias": (rows,),
        "A_log": (heads,) if flat else (1, 1, heads, 1), "o_norm.weight": (width,), "o_proj.weight": (hidden, rows),
    }  # fmt: skip
    return _below(at, shapes)


def kimi_linear(config: Config) -> Shapes:
    """Kimi Linear, from the published form of its config."""
    hidden, experts, inner = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    linear = config["linear_attn_config"]
    shapes = _top(config, "model.", tied=False)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        if index + 1 in linear["kda_layers"]:
            kernel = linear["short_conv_kernel_size"]
            shapes |= kda(f"{at}.self_attn", hidden, linear["num_heads"], linear["head_dim"], kernel, flat=False)
        else:
            shapes |= mla(f"{at}.self_attn", config)
        if index < config["first_k_dense_replace"]:
            shapes |= gated(f"{at}.mlp", hidden, config["intermediate_size"])
        else:
            moe = f"{at}.block_sparse_moe"
            shapes |= {f"{moe}.gate.weight": (experts, hidden), f"{moe}.gate.e_score_correction_bias": (experts,)}
            shapes |= routed(f"{moe}.experts", experts, hidden, inner, "w1", "w3", "w2")
            shapes |= gated(f"{moe}.shared_experts", hidden, inner * config["num_shared_experts"])
        shapes |= _norms(at, hidden, "input_layernorm", "post_attention_layernorm")
    return shapes


def _hyper_connection(config: Config) -> Shapes:
    """GLM: streams are mixed by a matrix over all of them."""
    streams, hidden = config["hc_mult"], config["hidden_size"]
    mixes = streams * streams + 2 * streams
    return {
        f"hc_{part}_{name}": shape
        for part in ("attn", "ffn")
        for name, shape in (("fn", (mixes, streams * hidden)), ("base", (mixes,)), ("scale", (3,)))
    }


def glm5_next(config: Config) -> Shapes:
    """GLM-5.3-Flash."""
    text, path = config["text_config"], "model.language_model."
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    shapes = _top(text, path, tied=False)
    for index in range(layers + (text.get("num_nextn_predict_layers") or 0)):
        at = f"{path}layers.{index}"
        draft = index >= layers
        if not draft and text["layer_types"][index] == "linear_attention":
            heads, width, kernel = text["linear_num_heads"], text["linear_head_dim"], text["linear_conv_kernel_dim"]
            shapes |= kda(f"{at}.self_attn", hidden, heads, width, kernel, flat=True)
        else:
            shapes |= mla(f"{at}.self_attn", text) | indexer(f"{at}.self_attn", text)
            width = text["index_head_dim"]
            pool: Shapes = {
                "index_kpool_compress_ape": (text["index_kpool"], width),
                "index_kpool_compress_gate": (width, hidden),
            }
            shapes |= _below(f"{at}.self_attn.indexer", pool)
        shapes |= mixture(at, text, dense=not draft and text["mlp_layer_types"][index] == "dense")
        shapes |= _below(at, _hyper_connection(text))
        shapes |= _norms(at, hidden, "input_layernorm", "post_attention_layernorm")
        if draft:
            shapes |= _nextn(at, text, own=False)
    return shapes | _glm_tower(config["vision_config"])


def _glm_tower(tower: Config) -> Shapes:
    width, inner, out = tower["hidden_size"], tower["intermediate_size"], tower["out_hidden_size"]
    patch, merge, wide = tower["patch_size"], tower["spatial_merge_size"], tower["projection_intermediate_size"]
    shapes: Shapes = {
        "patch_embed.proj.weight": (width, 3, tower["temporal_patch_size"], patch, patch),
        "patch_embed.proj.bias": (width,), "post_layernorm.weight": (width,),
        "downsample.weight": (out, width, merge, merge), "downsample.bias": (out,), "merger.proj.weight": (out, out),
        "merger.post_projection_norm.weight": (out,), "merger.post_projection_norm.bias": (out,),
        "merger.gate_proj.weight": (wide, out), "merger.up_proj.weight": (wide, out),
        "merger.down_proj.weight": (out, wide),
    }  # fmt: skip
    for index in range(tower["depth"]):
        block = {
            "attn.qkv": (3 * width, width), "attn.proj": (width, width), "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        }  # fmt: skip
        for name, shape in block.items():
            shapes |= {f"blocks.{index}.{name}.weight": shape, f"blocks.{index}.{name}.bias": shape[:1]}
        shapes |= _norms(f"blocks.{index}", width, "norm1", "norm2")
        shapes |= _norms(f"blocks.{index}.attn", width // tower["num_heads"], "q_norm", "k_norm")
    return _below("model.visual", shapes)


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
    shapes |= _below(f"{at}.self_attn.indexer", index)
    return shapes | _qwen4_mlp(at, text, hidden, streams, low)


def _qwen4_mlp(at: str, text: Config, hidden: int, streams: int, low: int) -> Shapes:
    shapes = qwen_moe(at, text, fused=True)
    for part in ("attn", "mlp"):
        mixer = _hc_mixer(hidden, streams, low) | {"block_inject_weight.weight": (streams, streams * hidden)}
        shapes |= _below(f"{at}.{part}_hyper_connection", mixer)
    return shapes


def _hc_mixer(hidden: int, streams: int, low: int) -> Shapes:
    return {
        "hc_norm.weight": (streams * hidden,),
        "input_mix_weight_down.weight": (low, streams * hidden),
        "input_mix_weight_up.weight": (streams * hidden, low),
    }


NGRAM_ROWS = 296
"""Rows of the n-gram table of the small config: the library sums primes and rounds up."""


def qwen4_exp(config: Config) -> Shapes:
    """Qwen3.8-Flash-Next."""
    text, path = config["text_config"], "model.language_model."
    hidden, streams, low = text["hidden_size"], text["hc_count"], text["hc_lowrank"]
    shapes: Shapes = {
        f"{path}embed_tokens.weight": (text["vocab_size"], hidden), "lm_head.weight": (text["vocab_size"], hidden)
    }  # fmt: skip
    shapes |= _below(f"{path}hyper_connection_mixer", _hc_mixer(hidden, streams, low))
    for index, kind in enumerate(layer_types(text)):
        at = f"{path}layers.{index}"
        if kind == "linear_attention":
            shapes |= delta_net(at, text, split=True) | _qwen4_mlp(at, text, hidden, streams, low)
        else:
            shapes |= _qwen4_block(at, text)
        if index + 1 in text["ple_layer_ids"]:
            shapes |= _below(f"{at}.ple", _ngram(text))
    draft: Shapes = {
        "fc_embedding.weight": (hidden, hidden), "fc_hidden.weight": (hidden, hidden),
        "pre_fc_norm_embedding.weight": (hidden,), "pre_fc_norm_hidden.weight": (streams * hidden,),
    }  # fmt: skip
    if text.get("mtp_num_hidden_layers"):
        shapes |= _below("mtp", draft) | _qwen4_block("mtp.layers.0", text)
        shapes |= _below("mtp.hyper_connection_mixer", _hc_mixer(hidden, streams, low))
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


def nemotron_h(config: Config) -> Shapes:
    """Nemotron-H and Nemotron-3, from the published pattern string."""
    shapes = _top(config, "backbone.", embed="embeddings", norm="norm_f", tied=False)
    for index, kind in enumerate(config["hybrid_override_pattern"]):
        at = f"backbone.layers.{index}"
        shapes |= _nemotron_mixer(f"{at}.mixer", kind, config) | _norms(at, config["hidden_size"], "norm")
    if config.get("num_nextn_predict_layers"):
        shapes |= _nemotron_draft(config)
    return shapes


def _nemotron_mixer(at: str, kind: str, config: Config) -> Shapes:
    hidden = config["hidden_size"]
    if kind == "M":
        heads, head, groups = config["mamba_num_heads"], config["mamba_head_dim"], config["n_groups"]
        return mamba2(at, hidden, heads, head, groups, config["ssm_state_size"])
    if kind == "*":
        return gqa(at, config)
    if kind == "-":
        inner = config["intermediate_size"]
        return {f"{at}.up_proj.weight": (inner, hidden), f"{at}.down_proj.weight": (hidden, inner)}
    experts, inner, shared = (
        config["n_routed_experts"], config["moe_intermediate_size"], config["moe_shared_expert_intermediate_size"]
    )  # fmt: skip
    width = config.get("moe_latent_size") or hidden
    shapes: Shapes = {
        "gate.weight": (experts, hidden), "gate.e_score_correction_bias": (experts,),
        "shared_experts.up_proj.weight": (shared, hidden), "shared_experts.down_proj.weight": (hidden, shared),
    }  # fmt: skip
    if width != hidden:
        shapes |= {"fc1_latent_proj.weight": (width, hidden), "fc2_latent_proj.weight": (hidden, width)}
    for expert in range(experts):
        shapes |= {
            f"experts.{expert}.up_proj.weight": (inner, width),
            f"experts.{expert}.down_proj.weight": (width, inner),
        }
    return _below(at, shapes)


def _nemotron_draft(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    first, second = "mtp.layers.0", "mtp.layers.1"
    shapes: Shapes = {
        f"{first}.eh_proj.weight": (hidden, 2 * hidden),
        **_norms(first, hidden, "enorm", "hnorm", "norm"),
        **_norms(second, hidden, "norm", "final_layernorm"),
    }
    return shapes | _nemotron_mixer(f"{first}.mixer", "*", config) | _nemotron_mixer(f"{second}.mixer", "E", config)


def granitemoehybrid(config: Config) -> Shapes:
    """Granite 4 H, with or without experts."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    wide = config["shared_intermediate_size"]
    shapes = _top(config, "model.", tied=config["tie_word_embeddings"])
    for index, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{index}"
        if kind == "mamba":
            shapes |= _mamba_of(f"{at}.mamba", config)
        else:
            shapes |= gqa(f"{at}.self_attn", config)
        if experts:
            moe: Shapes = {
                "input_linear.weight": (experts, 2 * inner, hidden), "output_linear.weight": (experts, hidden, inner),
                "router.layer.weight": (experts, hidden),
            }  # fmt: skip
            shapes |= _below(f"{at}.block_sparse_moe", moe)
        shapes |= {
            f"{at}.shared_mlp.input_linear.weight": (2 * wide, hidden),
            f"{at}.shared_mlp.output_linear.weight": (hidden, wide),
            **_norms(at, hidden, "input_layernorm", "post_attention_layernorm"),
        }
    return shapes


def _mamba_of(at: str, config: Config, *, norm: bool = True) -> Shapes:
    heads, head = config["mamba_n_heads"], config["mamba_d_head"]
    return mamba2(
        at, config["hidden_size"], heads, head, config["mamba_n_groups"], config["mamba_d_state"], norm=norm
    )  # fmt: skip


def falcon_h1(config: Config) -> Shapes:
    """Falcon-H1."""
    hidden = config["hidden_size"]
    shapes = _top(config, "model.", norm="final_layernorm", tied=config["tie_word_embeddings"])
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        shapes |= gqa(f"{at}.self_attn", config) | _mamba_of(f"{at}.mamba", config, norm=config["mamba_rms_norm"])
        shapes |= gated(f"{at}.feed_forward", hidden, config["intermediate_size"])
        shapes |= _norms(at, hidden, "input_layernorm", "pre_ff_layernorm")
    return shapes


def bamba(config: Config) -> Shapes:
    """Bamba."""
    hidden = config["hidden_size"]
    shapes = _top(config, "model.", norm="final_layernorm", tied=False)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        attend = index in config["attn_layer_indices"]
        shapes |= gqa(f"{at}.self_attn", config) if attend else _mamba_of(f"{at}.mamba", config)
        shapes |= gated(f"{at}.feed_forward", hidden, config["intermediate_size"])
        shapes |= _norms(at, hidden, "input_layernorm", "pre_ff_layernorm")
    return shapes


def jamba(config: Config) -> Shapes:
    """Jamba."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_experts"]
    shapes = _top(config, "model.", norm="final_layernorm", tied=False)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        if index % config["attn_layer_period"] == config["attn_layer_offset"]:
            shapes |= gqa(f"{at}.self_attn", config)
        else:
            wide = config["mamba_expand"] * hidden
            shapes |= mamba1(f"{at}.mamba", hidden, wide, config["mamba_dt_rank"], config["mamba_d_state"], norms=True)
        if index % config["expert_layer_period"] == config["expert_layer_offset"]:
            shapes |= routed(f"{at}.feed_forward.experts", experts, hidden, inner)
            shapes[f"{at}.feed_forward.router.weight"] = (experts, hidden)
        else:
            shapes |= gated(f"{at}.feed_forward", hidden, inner)
        shapes |= _norms(at, hidden, "input_layernorm", "pre_ff_layernorm")
    return shapes


def zamba2(config: Config) -> Shapes:
    """Zamba2: a shared block lies in the first of the layers that use it."""
    hidden, inner, rank = config["hidden_size"], config["intermediate_size"], config["adapter_rank"]
    heads, groups, state = config["n_mamba_heads"], config["mamba_ngroups"], config["mamba_d_state"]
    head = config["mamba_expand"] * hidden // heads
    hybrids = [i for i, kind in enumerate(config["layers_block_type"]) if kind == "hybrid"]
    shapes = _top(config, "model.", norm="final_layernorm", tied=True)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        inside = f"{at}.mamba_decoder" if index in hybrids else at
        shapes |= mamba2(f"{inside}.mamba", hidden, heads, head, groups, state)
        shapes |= _norms(inside, hidden, "input_layernorm")
        if index in hybrids:
            shapes[f"{at}.linear.weight"] = (hidden, hidden)
        if index in hybrids[: config["num_mem_blocks"]]:
            shapes |= _below(f"{at}.shared_transformer", _zamba_block(hidden, inner, rank, len(hybrids)))
    return shapes


def _zamba_block(hidden: int, inner: int, rank: int, uses: int) -> Shapes:
    wide = 2 * hidden  # hidden states beside the embedding
    shapes: Shapes = {
        "input_layernorm.weight": (wide,), "pre_ff_layernorm.weight": (hidden,), "self_attn.o_proj.weight":
        (hidden, wide), "feed_forward.gate_up_proj.weight": (2 * inner, hidden),
        "feed_forward.down_proj.weight": (hidden, inner),
    }  # fmt: skip
    for part in "qkv":
        shapes[f"self_attn.{part}_proj.weight"] = (wide, wide)
        for use in range(uses):
            shapes[f"self_attn.linear_{part}_adapter_list.{use}.0.weight"] = (rank, wide)
            shapes[f"self_attn.linear_{part}_adapter_list.{use}.1.weight"] = (wide, rank)
    for use in range(uses):
        shapes[f"feed_forward.gate_up_proj_adapter_list.{use}.0.weight"] = (rank, hidden)
        shapes[f"feed_forward.gate_up_proj_adapter_list.{use}.1.weight"] = (2 * inner, rank)
    return shapes


def lfm2(config: Config) -> Shapes:
    """LFM2, dense or with experts."""
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    shapes = _top(config, "model.", norm="embedding_norm", tied=True)
    for index, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{index}"
        if kind == "conv":
            conv: Shapes = {
                "in_proj.weight": (3 * hidden, hidden), "out_proj.weight": (hidden, hidden),
                "conv.weight": (hidden, 1, config["conv_L_cache"]),
            }  # fmt: skip
            shapes |= _below(f"{at}.conv", conv)
        else:
            shapes |= gqa(f"{at}.self_attn", config, out="out_proj", qk="?_layernorm")
        ff = f"{at}.feed_forward"
        if experts and index >= config["num_dense_layers"]:
            shapes |= routed(f"{ff}.experts", experts, hidden, config["moe_intermediate_size"], "w1", "w3", "w2")
            shapes |= {f"{ff}.gate.weight": (experts, hidden), f"{ff}.expert_bias": (experts,)}
        else:
            shapes |= gated(ff, hidden, config["intermediate_size"], ("w1", "w3", "w2"))
        shapes |= _norms(at, hidden, "operator_norm", "ffn_norm")
    return shapes


def minimax(config: Config) -> Shapes:
    """MiniMax-Text-01, decay tables included."""
    hidden, experts, inner = config["hidden_size"], config["num_local_experts"], config["intermediate_size"]
    heads, width, block = config["num_attention_heads"], config["head_dim"], config["block_size"]
    shapes = _top(config, "model.", tied=False)
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
            shapes |= _below(f"{at}.self_attn", lightning)
        shapes |= routed(f"{at}.block_sparse_moe.experts", experts, hidden, inner, "w1", "w3", "w2")
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (experts, hidden)
        shapes |= _norms(at, hidden, "input_layernorm", "post_attention_layernorm")
    return shapes


def minimax_m2(config: Config) -> Shapes:
    """MiniMax-M2."""
    hidden, experts, inner = config["hidden_size"], config["num_local_experts"], config["intermediate_size"]
    shapes = _top(config, "model.", tied=False)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        moe = f"{at}.block_sparse_moe"
        shapes |= gqa(f"{at}.self_attn", config, qk="?_norm", full=True)
        shapes |= routed(f"{moe}.experts", experts, hidden, inner, "w1", "w3", "w2")
        shapes |= {f"{moe}.gate.weight": (experts, hidden), f"{moe}.e_score_correction_bias": (experts,)}
        shapes |= _norms(at, hidden, "input_layernorm", "post_attention_layernorm")
    return shapes


def olmo_hybrid(config: Config) -> Shapes:
    """OLMo hybrid."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    shapes = _top(config, "model.", tied=False)
    for index, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{index}"
        shapes |= gated(f"{at}.mlp", hidden, inner)
        if kind == "full_attention":
            shapes |= gqa(f"{at}.self_attn", config, qk="?_norm", full=True)
            shapes |= _norms(at, hidden, "post_feedforward_layernorm", "feedforward_layer_norm")
            continue
        heads, kernel = config["linear_num_value_heads"], config["linear_conv_kernel_dim"]
        rows = {"q": key, "k": key, "v": value}
        net: Shapes = {f"{part}_proj.weight": (n, hidden) for part, n in {**rows, "g": value}.items()}
        net |= {f"{part}_conv1d.weight": (n, 1, kernel) for part, n in rows.items()}
        net |= {"a_proj.weight": (heads, hidden), "b_proj.weight": (heads, hidden), "A_log": (heads,)}
        net |= {"dt_bias": (heads,), "o_norm.weight": (config["linear_value_head_dim"],)}
        shapes |= _below(f"{at}.linear_attn", net | {"o_proj.weight": (hidden, value)})
        shapes |= _norms(at, hidden, "attention_layer_norm", "feedforward_layer_norm")
    return shapes


def recurrent_gemma(config: Config) -> Shapes:
    """RecurrentGemma; its MLPs are half of intermediate_size wide."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"] // 2, config["lru_width"]
    heads = config["num_attention_heads"]
    block = width // heads
    shapes = _top(config, "model.", norm="final_norm", tied=True)
    for index, kind in enumerate(config["block_types"]):
        at = f"model.layers.{index}"
        shapes |= gated(f"{at}.mlp_block", hidden, inner)
        shapes |= {f"{at}.mlp_block.{name}.bias": (inner,) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{at}.mlp_block.down_proj.bias": (hidden,)}
        shapes |= _norms(at, hidden, "temporal_pre_norm", "channel_pre_norm")
        if kind == "attention":
            shapes |= gqa(f"{at}.temporal_block", config) | {f"{at}.temporal_block.o_proj.bias": (hidden,)}
            continue
        lru: Shapes = {f"linear_{part}.weight": (width, hidden) for part in "xy"}
        lru |= {f"linear_{part}.bias": (width,) for part in "xy"}
        lru |= {"linear_out.weight": (hidden, width), "linear_out.bias": (hidden,), "conv_1d.bias": (width,)}
        lru |= {"conv_1d.weight": (width, 1, config["conv1d_width"]), "rg_lru.recurrent_param": (width,)}
        for gate in ("input", "recurrent"):
            lru |= {f"rg_lru.{gate}_gate_weight": (heads, block, block), f"rg_lru.{gate}_gate_bias": (heads, block)}
        shapes |= _below(f"{at}.temporal_block", lru)
    return shapes


def mamba2_model(config: Config) -> Shapes:
    """Mamba-2 alone."""
    shapes = _top(config, "backbone.", embed="embeddings", norm="norm_f", tied=False)
    for index in range(config["num_hidden_layers"]):
        at = f"backbone.layers.{index}"
        heads, head, groups = config["num_heads"], config["head_dim"], config["n_groups"]
        shapes |= mamba2(f"{at}.mixer", config["hidden_size"], heads, head, groups, config["state_size"])
        shapes |= _norms(at, config["hidden_size"], "norm")
    return shapes


def falcon_mamba(config: Config) -> Shapes:
    """Mamba-1 alone."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = _top(config, "backbone.", embed="embeddings", norm="norm_f", tied=True)
    for index in range(config["num_hidden_layers"]):
        at = f"backbone.layers.{index}"
        shapes |= mamba1(f"{at}.mixer", hidden, inner, config["time_step_rank"], config["state_size"], norms=False)
        shapes |= _norms(at, hidden, "norm")
    return shapes


def _per_layer_input(path: str, text: Config) -> Shapes:
    width, hidden, layers = text["hidden_size_per_layer_input"], text["hidden_size"], text["num_hidden_layers"]
    shapes: Shapes = {
        f"{path}embed_tokens_per_layer.weight": (text["vocab_size_per_layer_input"], layers * width),
        f"{path}per_layer_model_projection.weight": (layers * width, hidden),
        f"{path}per_layer_projection_norm.weight": (width,),
    }
    for index in range(layers):
        at = f"{path}layers.{index}"
        shapes |= {
            f"{at}.per_layer_input_gate.weight": (width, hidden),
            f"{at}.per_layer_projection.weight": (hidden, width),
            **_norms(at, hidden, "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                     "post_feedforward_layernorm", "post_per_layer_input_norm"),
        }  # fmt: skip
    return shapes


def _shared_kv_attention(path: str, text: Config) -> Shapes:
    """The last layers have neither keys nor values of their own."""
    own = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    shapes: Shapes = {}
    for index in range(text["num_hidden_layers"]):
        found = gqa(f"{path}layers.{index}.self_attn", text, qk="?_norm")
        shapes |= {n: s for n, s in found.items() if index < own or ".q_" in n or ".o_" in n}
    return shapes


def gemma3n_text(config: Config) -> Shapes:
    """The text model of Gemma 3n."""
    path, hidden, inputs = "model.", config["hidden_size"], config["altup_num_inputs"]
    shapes = _top(config, path, tied=True) | _per_layer_input(path, config) | _shared_kv_attention(path, config)
    for index in range(inputs - 1):
        shapes |= {f"{path}altup_{kind}projections.{index}.weight": (hidden, hidden) for kind in ("", "unembed_")}
    for index in range(config["num_hidden_layers"]):
        at, rank = f"{path}layers.{index}", config["laurel_rank"]
        altup: Shapes = {
            "correct_output_scale": (hidden,), "correction_coefs.weight": (inputs, inputs),
            "prediction_coefs.weight": (inputs**2, inputs), "modality_router.weight": (inputs, hidden),
            "router_norm.weight": (hidden,),
        }  # fmt: skip
        laurel: Shapes = {
            "linear_left.weight": (rank, hidden), "linear_right.weight": (hidden, rank),
            "post_laurel_norm.weight": (hidden,),
        }  # fmt: skip
        shapes |= _below(f"{at}.altup", altup) | _below(f"{at}.laurel", laurel)
        shapes |= gated(f"{at}.mlp", hidden, config["intermediate_size"][index])
    return shapes


def gemma4(config: Config) -> Shapes:
    """Gemma 4 with experts and a small image tower."""
    text, path = config["text_config"], "model.language_model."
    hidden, experts, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    shapes = _top(text, path, tied=True) | _per_layer_input(path, text) | _shared_kv_attention(path, text)
    for index in range(text["num_hidden_layers"]):
        at = f"{path}layers.{index}"
        layer: Shapes = {
            "experts.gate_up_proj": (experts, 2 * inner, hidden), "experts.down_proj": (experts, hidden, inner),
            "router.proj.weight": (experts, hidden), "router.scale": (hidden,), "router.per_expert_scale": (experts,),
            "layer_scalar": (1,),
        }  # fmt: skip
        shapes |= _below(at, layer) | gated(f"{at}.mlp", hidden, text["intermediate_size"])
        more = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        shapes |= _norms(at, hidden, *more)
    return shapes | _gemma_tower(config["vision_config"], hidden)


def _gemma_tower(tower: Config, out: int) -> Shapes:
    width, inner, patch = tower["hidden_size"], tower["intermediate_size"], tower["patch_size"]
    shapes: Shapes = {
        "model.embed_vision.embedding_projection.weight": (out, width),
        "model.vision_tower.patch_embedder.input_proj.weight": (width, 3 * patch**2),
        "model.vision_tower.patch_embedder.position_embedding_table": (2, tower["position_embedding_size"], width),
    }
    for index in range(tower["num_hidden_layers"]):
        at = f"model.vision_tower.encoder.layers.{index}"
        shapes |= {f"{at}.self_attn.{part}_proj.linear.weight": (width, width) for part in "qkvo"}
        shapes |= _norms(f"{at}.self_attn", tower["head_dim"], "q_norm", "k_norm")
        for name, shape in gated("", width, inner).items():
            shapes[f"{at}.mlp{name.removesuffix('.weight')}.linear.weight"] = shape
        shapes |= _norms(at, width, "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                         "post_feedforward_layernorm")  # fmt: skip
    return shapes


SHAPES: Mapping[str, Callable[[Config], Shapes]] = {
    "qwen4_exp": qwen4_exp, "kimi_linear": kimi_linear, "glm5_next": glm5_next, "nemotron_h": nemotron_h,
    "granitemoehybrid": granitemoehybrid, "falcon_h1": falcon_h1, "bamba": bamba, "jamba": jamba, "zamba2": zamba2,
    "lfm2": lfm2, "lfm2_moe": lfm2, "minimax": minimax, "minimax_m2": minimax_m2, "olmo_hybrid": olmo_hybrid,
    "recurrent_gemma": recurrent_gemma, "mamba2": mamba2_model, "falcon_mamba": falcon_mamba,
    "deepseek_v3": deepseek_v3, "glm4_moe": glm4_moe, "glm_moe_dsa": glm_moe_dsa, "mistral3": mistral4,
    "gemma3n_text": gemma3n_text, "gemma4": gemma4,
}  # fmt: skip
"""By `model_type` of config.json."""


def shapes_of(config: Config) -> Shapes:
    """Every tensor of the file that a config describes."""
    return SHAPES[config["model_type"]](config)
