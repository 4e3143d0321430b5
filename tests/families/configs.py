"""Small configs of every family, in the form that is published, and some published models as configs.

Widths take every scheme (int4 g128, NVFP4 g16, FP8) where the family's own constraints allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.checkpoints import config_of

Config = dict[str, Any]

V, H, I, IM = 512, 256, 512, 128  # noqa: E741
_BASE: Config = {
    "dtype": "bfloat16", "hidden_size": H, "vocab_size": V, "tie_word_embeddings": False, "use_cache": True,
    "initializer_range": 0.02, "hidden_act": "silu", "bos_token_id": None, "eos_token_id": 503, "pad_token_id": 501,
}  # fmt: skip
_HEADS: Config = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
_MLA: Config = {
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_INDEXER: Config = {"index_n_heads": 2, "index_head_dim": 64, "index_topk": 16}
_MOE: Config = {
    "moe_intermediate_size": IM, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
_MAMBA: Config = {
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
_ROPE: Config = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
_FOUR = ["linear_attention"] * 3 + ["full_attention"]


def _of(model_type: str, architecture: str, *parts: Mapping[str, Any], **fields: Any) -> Config:
    config: Config = {"architectures": [architecture], "model_type": model_type, **_BASE}
    for part in parts:
        config |= part
    return config | fields


KIMI = _of(
    "kimi_linear", "KimiLinearForCausalLM", _MLA, q_lora_rank=None, num_hidden_layers=4, intermediate_size=I,
    moe_intermediate_size=IM, num_experts=4, num_experts_per_token=2, num_shared_experts=1, first_k_dense_replace=1,
    moe_layer_freq=1, num_expert_group=1, topk_group=1, moe_renormalize=True, moe_router_activation_func="sigmoid",
    routed_scaling_factor=2.446, use_grouped_topk=True, mla_use_nope=True, rms_norm_eps=1e-5, rope_theta=10000.0,
    linear_attn_config={
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 128, "num_heads": 2, "short_conv_kernel_size": 4,
    },
)  # fmt: skip
NEMOTRON = _of(
    "nemotron_h", "NemotronHForCausalLM", _HEADS, _MOE, hybrid_override_pattern="MEM*", num_hidden_layers=4,
    intermediate_size=I, ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=64, n_groups=2, conv_kernel=4,
    chunk_size=16, expand=2, moe_shared_expert_intermediate_size=256, mlp_hidden_act="relu2", use_bias=False,
    use_conv_bias=True, mlp_bias=False, mamba_proj_bias=False, attention_bias=False, layer_norm_epsilon=1e-5,
    residual_in_fp32=False, mamba_hidden_act="silu", routed_scaling_factor=1.0,
)  # fmt: skip
GRANITE = _of(
    "granitemoehybrid", "GraniteMoeHybridForCausalLM", _MAMBA, _ROPE, num_attention_heads=2, num_key_value_heads=1,
    num_hidden_layers=4, layer_types=["mamba", "mamba", "mamba", "attention"], intermediate_size=IM,
    shared_intermediate_size=I, num_local_experts=4, num_experts_per_tok=2, position_embedding_type="nope",
    tie_word_embeddings=True, attention_bias=False, rms_norm_eps=1e-5, logits_scaling=1.0, embedding_multiplier=1.0,
    residual_multiplier=1.0, attention_multiplier=0.0078125,
)  # fmt: skip
FALCON = _of(
    "falcon_h1", "FalconH1ForCausalLM", _MAMBA, _HEADS, _ROPE, num_hidden_layers=2, intermediate_size=I,
    mamba_d_ssm=512, mamba_rms_norm=False, mamba_norm_before_gate=True, attention_bias=False, mlp_bias=False,
    projectors_bias=False, rms_norm_eps=1e-5,
)  # fmt: skip
_LFM2 = {
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3, "intermediate_size": I,
    "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5,
    "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}  # fmt: skip
LFM2 = _of("lfm2", "Lfm2ForCausalLM", _LFM2, block_auto_adjust_ff_dim=False, block_multiple_of=256)
LFM2_MOE = _of(
    "lfm2_moe", "Lfm2MoeForCausalLM", _LFM2, moe_intermediate_size=IM, num_experts=4, num_experts_per_tok=2,
    num_dense_layers=1, use_expert_bias=True, norm_topk_prob=True, routed_scaling_factor=1.0,
)  # fmt: skip
DEEPSEEK = _of(
    "deepseek_v3", "DeepseekV3ForCausalLM", _MLA, _MOE, _ROPE, num_hidden_layers=2, intermediate_size=I,
    first_k_dense_replace=1, num_nextn_predict_layers=1, attention_bias=False, rms_norm_eps=1e-6, rope_interleave=True,
)  # fmt: skip
GLM4 = _of(
    "glm4_moe", "Glm4MoeForCausalLM", _HEADS, _MOE, num_hidden_layers=2, intermediate_size=I, first_k_dense_replace=1,
    num_nextn_predict_layers=1, use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5, rms_norm_eps=1e-5,
    rope_parameters={"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
)  # fmt: skip
GLM5 = _of(
    "glm_moe_dsa", "GlmMoeDsaForCausalLM", _MLA, _MOE, _INDEXER, _ROPE, num_hidden_layers=2, intermediate_size=I,
    mlp_layer_types=["dense", "sparse"], first_k_dense_replace=1, num_nextn_predict_layers=1, attention_bias=False,
    rms_norm_eps=1e-5, head_dim=64,
)  # fmt: skip
MISTRAL4: Config = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "dtype": "bfloat16",
    "tie_word_embeddings": False, "image_token_index": 10, "spatial_merge_size": 2, "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu", "vision_feature_layer": -1,
    "text_config": _of(
        "mistral4", "", _MLA, _MOE, num_hidden_layers=2, intermediate_size=I, first_k_dense_replace=1, head_dim=64,
        rms_norm_eps=1e-6, rope_interleave=True, rope_parameters={
            "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192, "rope_theta": 10000.0,
            "rope_type": "default",
        },
    ),
    "vision_config": {
        "model_type": "pixtral", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "head_dim": 32, "image_size": 64, "patch_size": 16,
    },
}  # fmt: skip
GLM5_NEXT: Config = {
    "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "dtype": "bfloat16",
    "tie_word_embeddings": False, "image_token_id": 506, "video_token_id": 507, "image_start_token_id": 508,
    "image_end_token_id": 509, "video_start_token_id": 510, "video_end_token_id": 511,
    "text_config": _of(
        "glm5_next_text", "", _MLA, _MOE, _INDEXER, qk_rope_head_dim=0, num_hidden_layers=4, intermediate_size=I,
        layer_types=["linear_attention"] * 3 + ["deepseek_sparse_attention"], linear_num_heads=2, linear_head_dim=128,
        mlp_layer_types=["dense", "dense", "dense", "sparse"], linear_conv_kernel_dim=4, hc_mult=2, index_kpool=16,
        num_nextn_predict_layers=1, rms_norm_eps=1e-5,
    ),
    "vision_config": {
        "model_type": "glm5_next_vision", "depth": 2, "hidden_size": 128, "num_heads": 4, "image_size": 64,
        "patch_size": 16, "out_hidden_size": H, "intermediate_size": 256, "projection_intermediate_size": 256,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


def _qwen4() -> Config:
    config = config_of("qwen3_5_moe")
    text = config["text_config"]
    text |= {
        "model_type": "qwen4_exp_text", "layer_types": ["linear_attention"] * 3 + ["full_attention"], "hc_count": 2,
        "hc_lowrank": 32, "ple_layer_ids": [1], "ple_embed_dim": 64, "ple_conv_kernel_size": 4, "ngram_size": 3,
        "heads_per_ngram": 2, "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32,
        "indexer_budget": 16, "indexer_compress_ratio": 4, "eos_token_id": 1,
    }  # fmt: skip
    vision = {**config["vision_config"], "model_type": "qwen4_exp_vision"}
    return {
        **config, "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
        "vision_config": vision,
    }  # fmt: skip


BAMBA = _of(
    "bamba", "BambaForCausalLM", _MAMBA, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3,
    intermediate_size=I, attn_layer_indices=[1], attention_bias=False, mlp_bias=False, rms_norm_eps=1e-5,
    partial_rotary_factor=0.5,
    rope_parameters={"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
)  # fmt: skip
JAMBA = _of(
    "jamba", "JambaForCausalLM", num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=4,
    intermediate_size=I, num_experts=4, num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1,
    attn_layer_period=4, attn_layer_offset=2, mamba_d_state=16, mamba_dt_rank=16, mamba_expand=2, mamba_d_conv=4,
    mamba_conv_bias=True, mamba_proj_bias=False, use_mamba_kernels=False, rms_norm_eps=1e-6,
)  # fmt: skip
ZAMBA2 = _of(
    "zamba2", "Zamba2ForCausalLM", _ROPE, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=4,
    intermediate_size=I, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], hybrid_layer_ids=[1, 3],
    num_mem_blocks=1, use_shared_attention_adapter=True, adapter_rank=16, use_mem_rope=True, n_mamba_heads=8,
    mamba_ngroups=1, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, chunk_size=16, tie_word_embeddings=True,
    hidden_act="gelu", add_bias_linear=False, rms_norm_eps=1e-5,
)  # fmt: skip
MINIMAX = _of(
    "minimax", "MiniMaxForCausalLM", _HEADS, num_hidden_layers=2, intermediate_size=IM, num_local_experts=4,
    num_experts_per_tok=2, layer_types=["linear_attention", "full_attention"], block_size=16, rms_norm_eps=1e-5,
    rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
)  # fmt: skip
MINIMAX_M2 = _of(
    "minimax_m2", "MiniMaxM2ForCausalLM", _HEADS, num_hidden_layers=2, intermediate_size=IM, num_local_experts=4,
    num_experts_per_tok=2, rms_norm_eps=1e-6, rope_parameters={"rope_theta": 5000000.0, "rope_type": "default"},
)  # fmt: skip
OLMO = _of(
    "olmo_hybrid", "OlmoHybridForCausalLM", _ROPE, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=4,
    intermediate_size=I, layer_types=_FOUR, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=64,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True, attention_bias=False,
    rms_norm_eps=1e-6,
)  # fmt: skip
RECURRENT_GEMMA = _of(
    "recurrent_gemma", "RecurrentGemmaForCausalLM", num_attention_heads=2, num_key_value_heads=1, head_dim=128,
    num_hidden_layers=3, intermediate_size=2 * I, lru_width=H, conv1d_width=4, tie_word_embeddings=True,
    block_types=["recurrent", "recurrent", "attention"], hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6,
    partial_rotary_factor=0.5, attention_window_size=2048, logits_soft_cap=30.0,
    rope_parameters={"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
)  # fmt: skip
MAMBA2 = _of(
    "mamba2", "Mamba2ForCausalLM", num_hidden_layers=2, state_size=16, num_heads=8, head_dim=64, expand=2, n_groups=1,
    chunk_size=16, conv_kernel=4, use_bias=False, use_conv_bias=True,
)  # fmt: skip
FALCON_MAMBA = _of(
    "falcon_mamba", "FalconMambaForCausalLM", num_hidden_layers=2, state_size=16, time_step_rank=16, expand=2,
    intermediate_size=512, conv_kernel=4, use_bias=False, use_conv_bias=True, use_mambapy=False,
    tie_word_embeddings=True,
)  # fmt: skip
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA_ROPE = {
    "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
GEMMA3N = _of(
    "gemma3n_text", "Gemma3nForCausalLM", _HEADS, num_hidden_layers=5, intermediate_size=[I] * 5,
    hidden_size_per_layer_input=32, vocab_size_per_layer_input=504, num_kv_shared_layers=2, laurel_rank=16,
    altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 5, layer_types=_SLIDING, tie_word_embeddings=True,
    hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, sliding_window=512, rope_parameters=_GEMMA_ROPE,
)  # fmt: skip
GEMMA4: Config = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
    "tie_word_embeddings": True, "boi_token_id": 507, "eoi_token_id": 508, "image_token_id": 509,
    "video_token_id": 510, "boa_token_id": 506, "eoa_token_index": 505, "audio_token_id": 511, "audio_config": None,
    "text_config": _of(
        "gemma4_text", "", _HEADS, global_head_dim=128, num_hidden_layers=4, intermediate_size=I,
        hidden_size_per_layer_input=32, vocab_size_per_layer_input=V, num_kv_shared_layers=1, enable_moe_block=True,
        num_experts=4, top_k_experts=2, moe_intermediate_size=IM, tie_word_embeddings=True, rms_norm_eps=1e-6,
        layer_types=["sliding_attention", "full_attention"] * 2, hidden_activation="gelu_pytorch_tanh",
        sliding_window=512, rope_parameters={
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    ),
    "vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "position_embedding_size": 64,
        "patch_size": 16, "pooling_kernel_size": 3,
    },
}  # fmt: skip

CASES: Mapping[str, Config] = {
    "kimi_linear": KIMI,
    "nemotron_h": {**NEMOTRON, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    "nemotron_h dense": {**NEMOTRON, "hybrid_override_pattern": "M-M*"},
    "nemotron_h latent": {**NEMOTRON, "moe_latent_size": 128},
    "granitemoehybrid": GRANITE,
    "granitemoehybrid dense": {**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0},
    "falcon_h1": FALCON,
    "falcon_h1 norm": {**FALCON, "mamba_rms_norm": True, "tie_word_embeddings": True},
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3 direct": {**DEEPSEEK, "q_lora_rank": None, "num_nextn_predict_layers": 0},
    "glm4_moe": GLM4,
    "glm4_moe plain": {**GLM4, "use_qk_norm": False, "attention_bias": False},
    "glm_moe_dsa": GLM5,
    "qwen4_exp": _qwen4(),
    "glm5_next": GLM5_NEXT,
    "bamba": BAMBA,
    "jamba": JAMBA,
    "zamba2": ZAMBA2,
    "minimax": MINIMAX,
    "minimax_m2": MINIMAX_M2,
    "olmo_hybrid": OLMO,
    "mistral4": MISTRAL4,
    "recurrent_gemma": RECURRENT_GEMMA,
    "mamba2": MAMBA2,
    "falcon_mamba": FALCON_MAMBA,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
}
"""Small configs by name: the layout family, and what is special."""


def family_of(case: str) -> str:
    """The layout family of a case."""
    return case.partition(" ")[0]
