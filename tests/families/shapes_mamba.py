"""Models with Mamba mixers: Nemotron-H, Granite 4 H, Falcon-H1, Bamba, Jamba, Zamba2, and Mamba alone."""

from __future__ import annotations

from tests.data.shapes import Shapes
from tests.families.parts import Config, below, gated, gqa, mamba1, mamba2, norms, routed, top


def nemotron_h(config: Config) -> Shapes:
    """Nemotron-H and Nemotron-3, from the published pattern string."""
    shapes = top(config, "backbone.", embed="embeddings", norm="norm_f", tied=False)
    for index, kind in enumerate(config["hybrid_override_pattern"]):
        at = f"backbone.layers.{index}"
        shapes |= _nemotron_mixer(f"{at}.mixer", kind, config) | norms(at, config["hidden_size"], "norm")
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
    return below(at, shapes)


def _nemotron_draft(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    first, second = "mtp.layers.0", "mtp.layers.1"
    shapes: Shapes = {
        f"{first}.eh_proj.weight": (hidden, 2 * hidden),
        **norms(first, hidden, "enorm", "hnorm", "norm"),
        **norms(second, hidden, "norm", "final_layernorm"),
    }
    return shapes | _nemotron_mixer(f"{first}.mixer", "*", config) | _nemotron_mixer(f"{second}.mixer", "E", config)


def granitemoehybrid(config: Config) -> Shapes:
    """Granite 4 H, with or without experts."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    wide = config["shared_intermediate_size"]
    shapes = top(config, "model.", tied=config["tie_word_embeddings"])
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
            shapes |= below(f"{at}.block_sparse_moe", moe)
        shapes |= {
            f"{at}.shared_mlp.input_linear.weight": (2 * wide, hidden),
            f"{at}.shared_mlp.output_linear.weight": (hidden, wide),
            **norms(at, hidden, "input_layernorm", "post_attention_layernorm"),
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
    shapes = top(config, "model.", norm="final_layernorm", tied=config["tie_word_embeddings"])
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        shapes |= gqa(f"{at}.self_attn", config) | _mamba_of(f"{at}.mamba", config, norm=config["mamba_rms_norm"])
        shapes |= gated(f"{at}.feed_forward", hidden, config["intermediate_size"])
        shapes |= norms(at, hidden, "input_layernorm", "pre_ff_layernorm")
    return shapes


def bamba(config: Config) -> Shapes:
    """Bamba."""
    hidden = config["hidden_size"]
    shapes = top(config, "model.", norm="final_layernorm", tied=False)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        attend = index in config["attn_layer_indices"]
        shapes |= gqa(f"{at}.self_attn", config) if attend else _mamba_of(f"{at}.mamba", config)
        shapes |= gated(f"{at}.feed_forward", hidden, config["intermediate_size"])
        shapes |= norms(at, hidden, "input_layernorm", "pre_ff_layernorm")
    return shapes


def jamba(config: Config) -> Shapes:
    """Jamba."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_experts"]
    shapes = top(config, "model.", norm="final_layernorm", tied=False)
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
        shapes |= norms(at, hidden, "input_layernorm", "pre_ff_layernorm")
    return shapes


def zamba2(config: Config) -> Shapes:
    """Zamba2: a shared block lies in the first of the layers that use it."""
    hidden, inner, rank = config["hidden_size"], config["intermediate_size"], config["adapter_rank"]
    heads, groups, state = config["n_mamba_heads"], config["mamba_ngroups"], config["mamba_d_state"]
    head = config["mamba_expand"] * hidden // heads
    hybrids = [i for i, kind in enumerate(config["layers_block_type"]) if kind == "hybrid"]
    shapes = top(config, "model.", norm="final_layernorm", tied=True)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        inside = f"{at}.mamba_decoder" if index in hybrids else at
        shapes |= mamba2(f"{inside}.mamba", hidden, heads, head, groups, state)
        shapes |= norms(inside, hidden, "input_layernorm")
        if index in hybrids:
            shapes[f"{at}.linear.weight"] = (hidden, hidden)
        if index in hybrids[: config["num_mem_blocks"]]:
            shapes |= below(f"{at}.shared_transformer", _zamba_block(hidden, inner, rank, len(hybrids)))
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


def mamba2_model(config: Config) -> Shapes:
    """Mamba-2 alone."""
    shapes = top(config, "backbone.", embed="embeddings", norm="norm_f", tied=False)
    for index in range(config["num_hidden_layers"]):
        at = f"backbone.layers.{index}"
        heads, head, groups = config["num_heads"], config["head_dim"], config["n_groups"]
        shapes |= mamba2(f"{at}.mixer", config["hidden_size"], heads, head, groups, config["state_size"])
        shapes |= norms(at, config["hidden_size"], "norm")
    return shapes


def falcon_mamba(config: Config) -> Shapes:
    """Mamba-1 alone."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = top(config, "backbone.", embed="embeddings", norm="norm_f", tied=True)
    for index in range(config["num_hidden_layers"]):
        at = f"backbone.layers.{index}"
        shapes |= mamba1(f"{at}.mixer", hidden, inner, config["time_step_rank"], config["state_size"], norms=False)
        shapes |= norms(at, hidden, "norm")
    return shapes
