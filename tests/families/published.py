"""Published models as configs; the sums are those of the library's own classes (see test_live_names)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.families.configs import DEEPSEEK, FALCON, GLM4, GRANITE, KIMI, LFM2, LFM2_MOE, NEMOTRON


@dataclass(frozen=True)
class Published:
    """A model: its config and its number of parameters, draft head excluded."""

    config: dict[str, Any]
    parameters: int


def _layers(count: int, attention: tuple[int, ...], other: str, name: str) -> list[str]:
    return [name if index in attention else other for index in range(count)]


_KDA_FULL = (4, 8, 12, 16, 20, 24, 27)

PUBLISHED: Mapping[str, Published] = {
    "Kimi-Linear-48B-A3B": Published(
        {
            **KIMI, "vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27, "intermediate_size": 9216,
            "moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_token": 8, "num_attention_heads": 32,
            "num_key_value_heads": 32, "head_dim": 72, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "linear_attn_config": {
                "kda_layers": [i for i in range(1, 28) if i not in _KDA_FULL], "full_attn_layers": list(_KDA_FULL),
                "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            },
        },
        49_122_681_728,
    ),
    "Nemotron-3-Nano-30B-A3B": Published(
        {
            **NEMOTRON, "vocab_size": 131072, "hidden_size": 2688, "num_hidden_layers": 52,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
            "ssm_state_size": 128, "n_groups": 8, "num_attention_heads": 32, "num_key_value_heads": 2,
            "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712, "intermediate_size": 1856,
        },
        31_577_940_288,
    ),
    "Granite-4.0-H-Small": Published(
        {
            **GRANITE, "vocab_size": 100352, "hidden_size": 4096, "num_hidden_layers": 40,
            "layer_types": _layers(40, (5, 15, 25, 35), "mamba", "attention"), "num_attention_heads": 32,
            "num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_d_state": 128, "intermediate_size": 768,
            "shared_intermediate_size": 1536, "num_local_experts": 72, "num_experts_per_tok": 10,
        },
        32_207_337_984,
    ),
    "Granite-4.0-H-Tiny": Published(
        {
            **GRANITE, "vocab_size": 100352, "hidden_size": 1536, "num_hidden_layers": 40,
            "layer_types": _layers(40, (5, 15, 25, 35), "mamba", "attention"), "num_attention_heads": 12,
            "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_state": 128, "intermediate_size": 512,
            "shared_intermediate_size": 1024, "num_local_experts": 64, "num_experts_per_tok": 6,
        },
        6_939_037_248,
    ),
    "LFM2-1.2B": Published(
        {
            **LFM2, "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
            "num_attention_heads": 32, "num_key_value_heads": 8,
            "layer_types": _layers(16, (2, 5, 8, 10, 12, 14), "conv", "full_attention"),
        },
        1_170_340_608,
    ),
    "LFM2-8B-A1B": Published(
        {
            **LFM2_MOE, "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 7168,
            "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2,
            "num_attention_heads": 32, "num_key_value_heads": 8,
            "layer_types": _layers(24, (2, 6, 10, 14, 18, 21), "conv", "full_attention"),
        },
        8_339_930_560,
    ),
    "DeepSeek-V3": Published(
        {
            **DEEPSEEK, "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
        },
        671_026_419_200,
    ),
    "GLM-4.5-Air": Published(
        {
            **GLM4, "vocab_size": 151552, "hidden_size": 4096, "num_hidden_layers": 46, "intermediate_size": 10944,
            "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8,
            "num_attention_heads": 96, "num_key_value_heads": 8, "use_qk_norm": False,
        },
        106_852_251_264,
    ),
    "Falcon-H1-34B": Published(
        {
            **FALCON, "vocab_size": 261120, "hidden_size": 5120, "num_hidden_layers": 72, "intermediate_size": 21504,
            "num_attention_heads": 20, "num_key_value_heads": 4, "mamba_n_heads": 32, "mamba_d_head": 128,
            "mamba_d_ssm": 4096, "mamba_d_state": 256, "mamba_n_groups": 2,
        },
        33_642_221_312,
    ),
}  # fmt: skip
