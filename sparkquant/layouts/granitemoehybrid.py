"""Granite 4 H: Mamba-2 with some attention layers, a shared gated MLP in every layer, experts in the larger models.

`shared_mlp.input_linear` holds gate and up in one tensor [2*Is, H]. Experts are stored stacked, behind a Linear-like
name (`block_sparse_moe.input_linear.weight` [E, 2*Im, H]); quantized ones are written one by one below `experts`, where
the engine looks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkquant.layers import NO_DRAFT_HEAD, Layout, Limit, TensorRule, config_int
from sparkquant.layers import LayerClass as C
from sparkquant.layouts import _decoder as d
from sparkquant.layouts import _mamba
from sparkquant.sizes import Sizes, even_heads

MODEL_TYPES = ("granitemoehybrid",)
ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)

_MOE = "block_sparse_moe"
OLD_LOADER = Limit(("0.25", "0.26"), "the loader puts quantized experts under a parameter name that is no longer there")


def experts(at: str) -> tuple[TensorRule, ...]:
    """Stacked [E, 2*Im, H] and [E, H, Im], or one by one in quantized checkpoints."""
    return (
        *(replace(rule, plain=(OLD_LOADER,)) for rule in d.experts(at, rf"{_MOE}\.experts")),
        TensorRule(
            rf"({at}\.{_MOE})\.input_linear\.weight", C.EXPERTS_GATE_UP, linear=True, parts=("gate_proj", "up_proj"),
            module=r"\1.experts.gate_up_proj", plain=(OLD_LOADER,),
            shape="E, 2*Im, H",
        ),
        TensorRule(
            rf"({at}\.{_MOE})\.output_linear\.weight", C.EXPERTS_DOWN, linear=True, parts=("down_proj",),
            module=r"\1.experts.down_proj", row_parallel=True, plain=(OLD_LOADER,), shape="E, H, Im",
        ),
    )  # fmt: skip


def sizes(config: Mapping[str, Any]) -> Sizes:
    """intermediate_size is that of one expert."""
    shared = "shared_intermediate_size"
    return {
        **even_heads(config),
        "Im": ("intermediate_size", config.get("intermediate_size")),
        "Is": (shared, config.get(shared)),
    }


def layout(config: Mapping[str, Any]) -> Layout:
    """Layout of a Granite-4-H checkpoint, with or without routed experts."""
    at = r"model\.layers\.\d+"
    return Layout(
        family="granitemoehybrid",
        rules=(
            *d.top(),
            *experts(at),
            d.kept(rf"{at}\.{_MOE}\.router\.layer\.weight", C.ROUTER),
            d.linear(rf"{at}\.shared_mlp\.input_linear", C.SHARED_EXPERT_GATE_UP, shape="2*Is, H"),
            d.linear(rf"{at}\.shared_mlp\.output_linear", C.SHARED_EXPERT_DOWN, row_parallel=True, shape="H, Is"),
            *_mamba.mamba2(at, "mamba", config_int(config, "mamba_n_groups", 0), aliases=(r"layers\.{n}\.mixer",)),
            *d.attention(at),
            *d.norms(at, "input_layernorm", "post_attention_layernorm"),
        ),
        mtp=NO_DRAFT_HEAD,
        ignore_always=(
            r"re:.*(?:mamba|mixer)\.conv1d$",
            r"re:.*block_sparse_moe\.(?:gate|router\.layer|router)$",
            r"re:.*embed_tokens$",
        ),
        tied_head=d.tied(config),
        experts=(config_int(config, "num_local_experts", 0), config_int(config, "num_experts_per_tok", 0)),
        live_names=(
            (r"(.*block_sparse_moe)\.input_linear\.weight$", r"\1.experts.gate_up_proj"),
            (r"(.*block_sparse_moe)\.output_linear\.weight$", r"\1.experts.down_proj"),
            (r"(.*block_sparse_moe\.router)\.layer\.weight$", r"\1.weight"),
        ),
    )
