"""Rules that most families share: embedding and head, attention, gated MLP, experts, router, norms, biases.

Every builder takes `at`, a regex of the path to a decoder layer. Shapes: H hidden, I intermediate, A/K query/key heads
of width D, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sparkquant.layers import ENGINES, Limit, TensorRule
from sparkquant.layers import LayerClass as C

PLAIN_HEAD = Limit(ENGINES, "the engine builds lm_head of this family without a quantization config")

REMOVED = "the engine removed this model class after 0.23"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part of a multimodal config, or the config itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def tied(config: Mapping[str, Any], *, default: bool = False) -> bool:
    """Whether lm_head reads the embedding; `default` is what the family does when its config is silent."""
    return bool(config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings", default)))


def linear(
    pattern: str,
    layer_class: C,
    fused: str = "",
    *,
    row_parallel: bool = False,
    aliases: tuple[str, ...] = (),
    plain: tuple[Limit, ...] = (),
    optional: bool = False,
    shape: str = "",
) -> TensorRule:
    """The weight of a Linear [out, in]."""
    return TensorRule(
        rf"{pattern}\.weight", layer_class, fused=fused, linear=True, row_parallel=row_parallel, aliases=aliases,
        plain=plain, optional=optional, shape=shape,
    )  # fmt: skip


def kept(pattern: str, layer_class: C, *, optional: bool = False) -> TensorRule:
    """A tensor that never takes a scheme; the whole name."""
    return TensorRule(pattern, layer_class, optional=optional)


def top(
    path: str = r"model\.",
    *,
    embed: str = "embed_tokens",
    norm: str = "norm",
    head: str = "lm_head",
    plain_head: bool = False,
) -> tuple[TensorRule, ...]:
    """Embedding and lm_head [V, H], final norm [H]."""
    return (
        TensorRule(rf"{path}{embed}\.weight", C.EMBED, required=True, shape="V, H"),
        TensorRule(rf"{path}{norm}\.weight", C.NORM, required=True, shape="H"),
        replace(linear(head, C.LM_HEAD, plain=(PLAIN_HEAD,) if plain_head else (), shape="V, H"), required=True),
    )


def norms(at: str, *names: str) -> tuple[TensorRule, ...]:
    """Norms [H] directly below a layer."""
    return (kept(rf"{at}\.(?:{'|'.join(names)})\.weight", C.NORM),)


def attention(
    at: str,
    path: str = "self_attn",
    *,
    out: str = "o_proj",
    qk_norms: str = "",
    aliases: tuple[str, ...] = (),
    shared_kv: bool = False,
) -> tuple[TensorRule, ...]:
    """Full attention: q [A*D, H], k and v [K*D, H], out [H, A*D]; biases and q/k norms where a family has them.

    shared_kv  some layers read the keys and values of an earlier one and have none of their own
    """
    rules = [
        linear(rf"{at}\.{path}\.q_proj", C.ATTENTION_QKV, "qkv_proj", aliases=aliases, shape="A*D, H"),
        linear(
            rf"{at}\.{path}\.[kv]_proj",
            C.ATTENTION_QKV,
            "qkv_proj",
            aliases=aliases,
            optional=shared_kv,
            shape="K*D, H",
        ),
        linear(rf"{at}\.{path}\.{out}", C.ATTENTION_OUT, row_parallel=True, aliases=aliases, shape="H, A*D"),
        kept(rf"{at}\.{path}\.(?:[qkv]_proj|{out})\.bias", C.STATE),
    ]
    if qk_norms:
        rules.append(kept(rf"{at}\.{path}\.{qk_norms}\.weight", C.NORM))
    return tuple(rules)


def mlp(
    at: str,
    path: str = "mlp",
    *,
    gate_up: C = C.MLP_GATE_UP,
    down: C = C.MLP_DOWN,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    fused: str = "gate_up_proj",
    aliases: tuple[str, ...] = (),
    inner: str = "I",
) -> tuple[TensorRule, ...]:
    """Gated MLP: gate and up [I, H], down [H, I], biases where a family has them."""
    gate, up, last = names
    return (
        linear(rf"{at}\.{path}\.(?:{gate}|{up})", gate_up, fused, aliases=aliases, shape=f"{inner}, H"),
        linear(rf"{at}\.{path}\.{last}", down, row_parallel=True, aliases=aliases, shape=f"H, {inner}"),
        kept(rf"{at}\.{path}\.(?:{gate}|{up}|{last})\.bias", C.STATE),
    )


def shared_experts(at: str, path: str, *, aliases: tuple[str, ...] = ()) -> tuple[TensorRule, ...]:
    """The expert that every token passes, a gated MLP."""
    return mlp(at, path, gate_up=C.SHARED_EXPERT_GATE_UP, down=C.SHARED_EXPERT_DOWN, aliases=aliases, inner="Is")


def experts(
    at: str,
    path: str,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    aliases: tuple[str, ...] = (),
) -> tuple[TensorRule, ...]:
    """Routed experts stored one by one: gate and up [Im, H], down [H, Im].

    First in a layout's rules: nearly all names of a large mixture are these, and the first match wins.
    """
    gate, up, down = names
    return (
        linear(rf"{at}\.{path}\.\d+\.(?:{gate}|{up})", C.EXPERTS_GATE_UP, "w13", aliases=aliases, shape="Im, H"),
        linear(rf"{at}\.{path}\.\d+\.{down}", C.EXPERTS_DOWN, row_parallel=True, aliases=aliases, shape="H, Im"),
    )


def stacked_experts(at: str, path: str, *, aliases: tuple[str, ...] = ()) -> tuple[TensorRule, ...]:
    """Routed experts stored as [E, 2*Im, H] and [E, H, Im] without `.weight`."""
    return (
        TensorRule(
            rf"{at}\.{path}\.gate_up_proj", C.EXPERTS_GATE_UP, linear=True, parts=("gate_proj", "up_proj"),
            aliases=aliases, shape="E, 2*Im, H",
        ),
        TensorRule(
            rf"{at}\.{path}\.down_proj", C.EXPERTS_DOWN, linear=True, parts=("down_proj",), row_parallel=True,
            aliases=aliases, shape="E, H, Im",
        ),
    )  # fmt: skip


def as_draft(rules: Iterable[TensorRule]) -> tuple[TensorRule, ...]:
    """The same rules inside a draft head: region wins over kind."""
    return tuple(replace(rule, layer_class=C.MTP) for rule in rules)
