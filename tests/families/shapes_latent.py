"""Models with latent attention or draft layers behind the last: DeepSeek, GLM, Mistral 4, Kimi Linear."""

from __future__ import annotations

from collections.abc import Callable

from tests.data.shapes import Shapes
from tests.families.parts import Config, below, gated, gqa, indexer, kda, mixture, mla, nextn, norms, routed, top


def _deepseek_like(config: Config, attend: Callable[[str], Shapes]) -> Shapes:
    layers, drafts = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    kinds = config.get("mlp_layer_types")
    shapes = top(config, "model.", tied=False)
    for index in range(layers + drafts):
        at = f"model.layers.{index}"
        first = index < config["first_k_dense_replace"]
        dense = kinds[index] == "dense" if kinds and index < layers else first and index < layers
        shapes |= mixture(at, config, dense=dense) | attend(f"{at}.self_attn")
        shapes |= norms(at, config["hidden_size"], "input_layernorm", "post_attention_layernorm")
        if index >= layers:
            shapes |= nextn(at, config, own=True)
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
    shapes = top(text, path, head="language_model.lm_head", tied=False)
    for index in range(text["num_hidden_layers"]):
        at = f"{path}layers.{index}"
        found = mixture(at, text, dense=index < text["first_k_dense_replace"])
        if f"{at}.mlp.gate.weight" in found:
            found = {k: v for k, v in found.items() if ".experts." not in k and not k.endswith("correction_bias")}
            experts, inner = text["n_routed_experts"], text["moe_intermediate_size"]
            found[f"{at}.mlp.experts.gate_up_proj"] = (experts, 2 * inner, text["hidden_size"])
            found[f"{at}.mlp.experts.down_proj"] = (experts, text["hidden_size"], inner)
        shapes |= found | mla(f"{at}.self_attn", text)
        shapes |= norms(at, text["hidden_size"], "input_layernorm", "post_attention_layernorm")
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
        shapes |= gated(f"{at}.feed_forward", width, inner) | norms(at, width, "attention_norm", "ffn_norm")
    return shapes


def kimi_linear(config: Config) -> Shapes:
    """Kimi Linear, from the published form of its config."""
    hidden, experts, inner = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    linear = config["linear_attn_config"]
    shapes = top(config, "model.", tied=False)
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
        shapes |= norms(at, hidden, "input_layernorm", "post_attention_layernorm")
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
    shapes = top(text, path, tied=False)
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
            shapes |= below(f"{at}.self_attn.indexer", pool)
        shapes |= mixture(at, text, dense=not draft and text["mlp_layer_types"][index] == "dense")
        shapes |= below(at, _hyper_connection(text))
        shapes |= norms(at, hidden, "input_layernorm", "post_attention_layernorm")
        if draft:
            shapes |= nextn(at, text, own=False)
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
        shapes |= norms(f"blocks.{index}", width, "norm1", "norm2")
        shapes |= norms(f"blocks.{index}.attn", width // tower["num_heads"], "q_norm", "k_norm")
    return below("model.visual", shapes)
