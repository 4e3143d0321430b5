"""Gemma 3n and Gemma 4: per-layer inputs, layers that share keys and values."""

from __future__ import annotations

from tests.data.shapes import Shapes
from tests.families.parts import Config, below, gated, gqa, norms, top


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
            **norms(at, hidden, "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
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
    shapes = top(config, path, tied=True) | _per_layer_input(path, config) | _shared_kv_attention(path, config)
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
        shapes |= below(f"{at}.altup", altup) | below(f"{at}.laurel", laurel)
        shapes |= gated(f"{at}.mlp", hidden, config["intermediate_size"][index])
    return shapes


def gemma4(config: Config) -> Shapes:
    """Gemma 4 with experts and a small image tower."""
    text, path = config["text_config"], "model.language_model."
    hidden, experts, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    shapes = top(text, path, tied=True) | _per_layer_input(path, text) | _shared_kv_attention(path, text)
    for index in range(text["num_hidden_layers"]):
        at = f"{path}layers.{index}"
        layer: Shapes = {
            "experts.gate_up_proj": (experts, 2 * inner, hidden), "experts.down_proj": (experts, hidden, inner),
            "router.proj.weight": (experts, hidden), "router.scale": (hidden,), "router.per_expert_scale": (experts,),
            "layer_scalar": (1,),
        }  # fmt: skip
        shapes |= below(at, layer) | gated(f"{at}.mlp", hidden, text["intermediate_size"])
        more = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        shapes |= norms(at, hidden, *more)
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
        shapes |= norms(f"{at}.self_attn", tower["head_dim"], "q_norm", "k_norm")
        for name, shape in gated("", width, inner).items():
            shapes[f"{at}.mlp{name.removesuffix('.weight')}.linear.weight"] = shape
        shapes |= norms(at, width, "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                         "post_feedforward_layernorm")  # fmt: skip
    return shapes
