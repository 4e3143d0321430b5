"""Names and shapes of the parts that models are made of: attention, MLPs, experts, mixers.

Written from model cards and model code, not from the layouts: what a layout calls a tensor is checked against these
names, and the sums are checked against the library's own model classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.data.shapes import Shapes

Config = Mapping[str, Any]


def below(at: str, parts: Mapping[str, tuple[int, ...]]) -> Shapes:
    return {f"{at}.{name}": shape for name, shape in parts.items()}


def norms(at: str, hidden: int, *names: str) -> Shapes:
    return {f"{at}.{name}.weight": (hidden,) for name in names}


def top(
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
    return below(at, parts)


def gated(at: str, hidden: int, inner: int, names: Iterable[str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    """Gated MLP."""
    gate, up, down = names
    shapes = {f"{gate}.weight": (inner, hidden), f"{up}.weight": (inner, hidden), f"{down}.weight": (hidden, inner)}
    return below(at, shapes)


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
    return below(at, shapes | ({"norm.weight": (inner,)} if norm else {}))


def mamba1(at: str, hidden: int, inner: int, rank: int, state: int, *, norms: bool) -> Shapes:
    """x and z in one projection; dt, B and C from x."""
    shapes: Shapes = {
        "in_proj.weight": (2 * inner, hidden), "x_proj.weight": (rank + 2 * state, inner),
        "dt_proj.weight": (inner, rank), "dt_proj.bias": (inner,), "out_proj.weight": (hidden, inner),
        "conv1d.weight": (inner, 1, 4), "conv1d.bias": (inner,), "A_log": (inner, state), "D": (inner,),
    }  # fmt: skip
    more = {"dt_layernorm.weight": (rank,), "b_layernorm.weight": (state,), "c_layernorm.weight": (state,)}
    return below(at, shapes | (more if norms else {}))


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
    return below(at, query | rest)


def indexer(at: str, config: Config) -> Shapes:
    """Sparse attention: queries from the latent, one key, a weight per head."""
    heads, width = config["index_n_heads"], config["index_head_dim"]
    shapes: Shapes = {
        "wq_b.weight": (heads * width, config["q_lora_rank"]), "wk.weight": (width, config["hidden_size"]),
        "weights_proj.weight": (heads, config["hidden_size"]), "k_norm.weight": (width,), "k_norm.bias": (width,),
    }  # fmt: skip
    return below(f"{at}.indexer", shapes)


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


def nextn(at: str, config: Config, *, own: bool) -> Shapes:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {
        "enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
    }  # fmt: skip
    copies: Shapes = {"embed_tokens.weight": (vocab, hidden), "shared_head.head.weight": (vocab, hidden)}
    return below(at, shapes | (copies if own else {}))


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
    return below(at, shapes)
