"""Name rules that the Qwen hybrid families share: attention, gated delta net, MLP, experts, draft head.

Shapes: H hidden, I intermediate, A/K query/key heads of width D, Kl/Vl key/value heads of the delta net of width Dk/Dv.
"""

from __future__ import annotations

from sparkquant.layers import LayerClass as C
from sparkquant.layers import Limit, TensorRule

LAYERS = r"model\.(?:language_model\.)?layers\.\d+"
"""Decoder layers, in text-only (`model.layers`) and multimodal (`model.language_model.layers`) checkpoints."""

IGNORE = (
    r"re:.*linear_attn\.in_proj_a$",
    r"re:.*linear_attn\.in_proj_b$",
    r"re:.*linear_attn\.in_proj_ba$",
    r"re:.*linear_attn\.conv1d$",
    r"re:.*visual\..*",
    r"re:.*mlp\.gate$",
    r"re:.*shared_expert_gate$",
    r"re:.*embed_tokens$",
)
"""Fits checkpoint names and engine names of every supported version; the draft head and lm_head are added by need."""

LIVE_NAMES = ((r"^model\.language_model\.", "model."),)
"""The text-only class drops the `language_model` level of a multimodal checkpoint's names."""


def _linear(pattern: str, layer_class: C, fused: str = "", *, row_parallel: bool = False, shape: str) -> TensorRule:
    return TensorRule(pattern, layer_class, fused=fused, linear=True, row_parallel=row_parallel, shape=shape)


def attention(at: str, qkv: C = C.ATTENTION_QKV, out: C = C.ATTENTION_OUT) -> tuple[TensorRule, ...]:
    """Full attention: q [2*A*D, H] (query and output gate interleaved per head), k and v [K*D, H], o [H, A*D]."""
    return (
        _linear(rf"{at}\.self_attn\.q_proj\.weight", qkv, "qkv_proj", shape="A*D|2*A*D, H"),
        _linear(rf"{at}\.self_attn\.[kv]_proj\.weight", qkv, "qkv_proj", shape="K*D, H"),
        _linear(rf"{at}\.self_attn\.o_proj\.weight", out, row_parallel=True, shape="H, A*D"),
    )


def mlp(
    at: str, gate_up: C = C.MLP_GATE_UP, down: C = C.MLP_DOWN, name: str = "mlp", inner: str = "I"
) -> tuple[TensorRule, ...]:
    """Gated MLP: gate and up [I, H], down [H, I]."""
    return (
        _linear(rf"{at}\.{name}\.(?:gate|up)_proj\.weight", gate_up, "gate_up_proj", shape=f"{inner}, H"),
        _linear(rf"{at}\.{name}\.down_proj\.weight", down, row_parallel=True, shape=f"H, {inner}"),
    )


def moe(at: str, gate_up: C = C.EXPERTS_GATE_UP, down: C = C.EXPERTS_DOWN) -> tuple[TensorRule, ...]:
    """Routed experts, either per expert ([Im, H] and [H, Im]) or fused ([E, 2*Im, H] and [E, H, Im], no `.weight`)."""
    return (
        _linear(rf"{at}\.mlp\.experts\.\d+\.(?:gate|up)_proj\.weight", gate_up, "gate_up_proj", shape="Im, H"),
        _linear(rf"{at}\.mlp\.experts\.\d+\.down_proj\.weight", down, row_parallel=True, shape="H, Im"),
        TensorRule(
            rf"{at}\.mlp\.experts\.gate_up_proj", gate_up, linear=True, parts=("gate_proj", "up_proj"),
            shape="E, 2*Im, H",
        ),
        TensorRule(
            rf"{at}\.mlp\.experts\.down_proj", down, linear=True, parts=("down_proj",), row_parallel=True,
            shape="E, H, Im",
        ),
    )  # fmt: skip


def shared_expert(
    at: str, gate_up: C = C.SHARED_EXPERT_GATE_UP, down: C = C.SHARED_EXPERT_DOWN
) -> tuple[TensorRule, ...]:
    """The expert that every token passes: gate and up [Is, H], down [H, Is]."""
    return mlp(at, gate_up, down, "mlp\\.shared_expert", inner="Is")


def router(at: str, layer_class: C = C.ROUTER) -> tuple[TensorRule, ...]:
    """Router [E, H] and the scalar gate of the shared expert [1, H]."""
    return (TensorRule(rf"{at}\.mlp\.(?:gate|shared_expert_gate)\.weight", layer_class),)


def delta_net_state(at: str) -> tuple[TensorRule, ...]:
    """What never takes a scheme in a gated delta net: A_log, dt_bias [Vl], conv1d [C, 1, 4], gated norm [Dv]."""
    return (
        TensorRule(rf"{at}\.linear_attn\.(?:A_log|dt_bias)", C.LINEAR_ATTENTION_GATES),
        TensorRule(rf"{at}\.linear_attn\.conv1d\.weight", C.LINEAR_ATTENTION_CONV),
        TensorRule(rf"{at}\.linear_attn\.norm\.weight", C.NORM),
    )


def norms(at: str) -> tuple[TensorRule, ...]:
    """Layer norms and the q/k norms of attention."""
    return (
        TensorRule(rf"{at}\.(?:input_layernorm|post_attention_layernorm)\.weight", C.NORM),
        TensorRule(rf"{at}\.self_attn\.[qk]_norm\.weight", C.NORM),
    )


TEXT_ONLY = Limit(("0.25", "0.26"), "the text-only class came later; the multimodal one is there")


def top(*, plain_head: tuple[Limit, ...] = ()) -> tuple[TensorRule, ...]:
    """Embedding and lm_head [V, H], final norm; `plain_head` says where the engine takes the head in 16 bits only."""
    return (
        TensorRule(r"model\.(?:language_model\.)?embed_tokens\.weight", C.EMBED, required=True, shape="V, H"),
        TensorRule(r"model\.(?:language_model\.)?norm\.weight", C.NORM, required=True, shape="H"),
        TensorRule(r"lm_head\.weight", C.LM_HEAD, linear=True, plain=plain_head, required=True, shape="V, H"),
    )


def draft_head(*, experts: bool) -> tuple[TensorRule, ...]:
    """The MTP block. Its Linears can take 8 bits through `unprotect`, except `mtp.fc` (16-bit in the official file)."""
    at = r"mtp\.layers\.\d+"
    inner = (*moe(at, C.MTP, C.MTP), *shared_expert(at, C.MTP, C.MTP), *router(at, C.MTP)) if experts else ()
    return (
        *attention(at, C.MTP, C.MTP),
        *mlp(at, C.MTP, C.MTP),
        *inner,
        TensorRule(rf"{at}\.(?:input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight", C.MTP),
        TensorRule(r"mtp\.(?:fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.weight", C.MTP),
    )


def vision() -> tuple[TensorRule, ...]:
    """Vision tower and merger: every name below `model.visual`."""
    return (TensorRule(r"model\.visual\.(?:blocks|merger|patch_embed|pos_embed|deepstack_merger_list)\..+", C.VISION),)
