"""Latent attention (MLA), its sparse-attention indexer, and the mixture of experts that comes with it."""

from __future__ import annotations

from sparkquant.layers import LayerClass as C
from sparkquant.layers import Limit, TensorRule
from sparkquant.layouts import _decoder as d
from sparkquant.layouts._decoder import kept, linear

IGNORE = (r"re:.*mlp\.gate$", r"re:.*embed_tokens$")

INDEXER_IGNORE = (r"re:.*indexer\.wq_b$", r"re:.*indexer\.(?:wk|weights_proj|wk_weights_proj)$")
"""Split and fused names: the engine merges wk and weights_proj, and asks its config about wq_b."""


def mla(at: str, *, plain: tuple[Limit, ...] = ()) -> tuple[TensorRule, ...]:
    """q_a [r, H] and kv_a [kv + rope, H] are one engine module, q_b [A*(nope + rope), r], kv_b [A*(nope + v), kv].

    Without a query rank there is q_proj instead of q_a and q_b, and kv_a is a module of its own.
    """
    path = rf"{at}\.self_attn"
    return (
        linear(rf"{path}\.q_a_proj", C.MLA_Q, "fused_qkv_a_proj", plain=plain, shape="rq, H"),
        linear(rf"{path}\.(?:q_b_proj|q_proj)", C.MLA_Q, plain=plain, shape="A*nope+A*rope, rq|H"),
        linear(rf"{path}\.kv_a_proj_with_mqa", C.MLA_KV, "fused_qkv_a_proj", plain=plain, shape="rkv+rope, H"),
        linear(rf"{path}\.kv_b_proj", C.MLA_KV, plain=plain, shape="A*nope+A*v, rkv"),
        linear(rf"{path}\.o_proj", C.MLA_OUT, row_parallel=True, plain=plain, shape="H, A*v"),
        kept(rf"{path}\.(?:q_a_proj|kv_a_proj_with_mqa|o_proj)\.bias", C.STATE),
        kept(rf"{path}\.(?:q|kv)_a_layernorm\.weight", C.NORM),
    )


def indexer(at: str) -> tuple[TensorRule, ...]:
    """What chooses the past tokens that are attended to: wq_b, wk, weights_proj, the norm of its keys."""
    path = rf"{at}\.self_attn\.indexer"
    return (
        kept(rf"{path}\.(?:wq_b|wk|weights_proj)\.weight", C.ROUTER),
        kept(rf"{path}\.k_norm\.(?:weight|bias)", C.NORM),
    )


def router(at: str) -> tuple[TensorRule, ...]:
    """Router [E, H] and the bias that balances its load [E]."""
    return (kept(rf"{at}\.mlp\.gate\.(?:weight|e_score_correction_bias)", C.ROUTER),)


def mixture(at: str) -> tuple[TensorRule, ...]:
    """Dense MLP in the first layers, then experts stored one by one, shared experts and router."""
    return (
        *d.experts(at, r"mlp\.experts"),
        *d.mlp(at),
        *d.shared_experts(at, r"mlp\.shared_experts"),
        *router(at),
        *d.norms(at, "input_layernorm", "post_attention_layernorm"),
    )
