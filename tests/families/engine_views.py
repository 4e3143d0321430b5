"""How vLLM's model classes name their modules, per family and version, as written in their code: rename, fuse, ask.

Only what the project's own engine rules do not hold is here; matching itself is theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkquant.engine.rules import EngineModule

QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj")}
MLA_A = {"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}
Fused = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class View:
    """One family in one version.

    renames  (regex, replacement) on checkpoint module names, all applied in order
    fused    fused leaf -> its shards, from the class's mapping
    opaque   fused leaves that the class builds but does not list: only their own name is looked up
    unasked  modules built without a quantization config (regex on the checkpoint's name)
    experts  leaf names under which expert 0 is looked up
    where    fused leaf -> regex of the modules that have it, where others hold leaves of the same names
    """

    renames: tuple[tuple[str, str], ...] = ()
    fused: Fused = field(default_factory=dict)
    opaque: Fused = field(default_factory=dict)
    unasked: str = r"(?!)"
    experts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    where: Mapping[str, str] = field(default_factory=dict)


_MULTIMODAL = ((r"^model\.language_model\.", "language_model.model."), (r"^model\.visual\.", "visual."))
_ROUTERS = r".*\.(?:gate|router|router\.layer|router\.proj|shared_expert_gate)"
_CONV = r".*conv1d|.*\.conv\.conv|.*conv_1d"


def view(family: str, config: Mapping[str, Any], version: str) -> View:
    """The names that a version uses for a family."""
    new = version == "0.33"
    plain = rf"{_ROUTERS}|{_CONV}"
    layers = config.get("num_hidden_layers", 0)
    if family == "kimi_linear":
        gates = {"in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj")}
        linear = "|".join(str(number - 1) for number in config["linear_attn_config"]["kda_layers"])
        where = {"in_proj_qkvgfab": rf".*layers\.(?:{linear})\.self_attn"}
        fused = {**GATE_UP, **gates} if new else {}
        return View(fused=fused, opaque={} if new else GATE_UP, unasked=plain, where=where)
    if family == "nemotron_h":
        looked_up = ("up_proj", "None", "down_proj") if new else ("gate_proj", "up_proj", "down_proj")
        return View(((r"^backbone\.", "model."),), QKV, unasked=plain, experts=looked_up)
    if family == "granitemoehybrid":
        return View(((r"\.mamba\.", ".mixer."),), QKV, unasked=plain)
    if family == "falcon_h1":
        return View(
            ((r"\.self_attn\.", "."), (r"\.layers\.(\d+)\.mamba\.", rf".{{{layers}+\1}}.mixer.")), {**QKV, **GATE_UP},
            unasked=rf"{plain}|lm_head",
        )  # fmt: skip
    if family in ("lfm2", "lfm2_moe"):
        conv = r"|.*\.conv\.(?:in|out)_proj"
        names = ("w1", "w3", "w2") if new else ("gate_proj", "up_proj", "down_proj")
        renames = ((r"\.conv\.", ".short_conv."),) if new else ()
        # The router of LFM2-MoE is built with the config: it must not be reached.
        unasked = _CONV + ("" if new else conv)
        return View(renames, {**QKV, "w13": ("w1", "w3")}, unasked=unasked, experts=names)
    if family in ("deepseek_v3", "glm_moe_dsa"):
        unasked = rf"{plain}|.*indexer\.(?:wk|weights_proj)|.*eh_proj|.*layers\.\d+\.embed_tokens"
        mla = MLA_A if config.get("q_lora_rank") else {}
        return View(fused={**GATE_UP, **mla}, unasked=unasked)
    if family == "glm4_moe":
        return View(fused={**QKV, **GATE_UP}, unasked=rf"{plain}|.*eh_proj|.*layers\.\d+\.embed_tokens")
    return _more(family, config, plain)


def _more(family: str, config: Mapping[str, Any], plain: str) -> View:
    if family == "qwen4_exp":
        fused = {
            "qkv_proj": ("q_proj", "k_proj", "v_proj", "indexer.index_qk_proj"), **GATE_UP,
            "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a"),
            "kv_proj": ("key_proj", "value_proj"),
        }  # fmt: skip
        return View(_MULTIMODAL, fused, unasked=rf"{plain}|.*hyper_connection.*|lm_head|.*ngram.*|.*visual.*embed.*")
    if family == "glm5_next":
        return View(_MULTIMODAL, GATE_UP, unasked=rf"{plain}|.*self_attn.*|.*visual.*|.*eh_proj|.*\.hc_.*")
    if family == "jamba":
        return View(
            ((r"\.self_attn\.", "."), (r"\.mamba\.", ".mixer.")), {**QKV, **GATE_UP},
            unasked=rf"{plain}|.*\.mamba\..*|lm_head",
        )  # fmt: skip
    if family == "zamba2":
        hybrids = sum(kind == "hybrid" for kind in config["layers_block_type"])
        renames = (
            (r"^model\.layers\.\d+\.shared_transformer\.(?:self_attn\.)?", "model."),
            (r"^model\.layers\.(\d+)\.(?:mamba_decoder\.)?mamba\.", rf"{{{hybrids}+\1}}.mixer."),
            (r"^model\.layers\.(\d+)\.linear", rf"{{{hybrids}+\1}}.linear"),
        )
        return View(renames, opaque=QKV, unasked=rf"{plain}|lm_head|.*adapter_list.*")
    if family == "minimax_m2":
        return View(((r"\.block_sparse_moe\.", ".mlp."),), QKV, unasked=plain, experts=())
    if family == "olmo_hybrid":
        net = {"in_proj_qkvg": ("q_proj", "k_proj", "v_proj", "g_proj")}
        where = {"in_proj_qkvg": r".*linear_attn", "qkv_proj": r".*self_attn"}
        return View(fused={**QKV, **GATE_UP, **net}, unasked=plain, where=where)
    if family == "mamba2":
        return View(unasked=rf"{plain}|lm_head")
    if family == "gemma3n":
        return View(fused={**QKV, **GATE_UP})
    if family == "gemma4":
        return View(
            (*_MULTIMODAL, (r"\.experts", ".moe.experts"), (r"^model\.", "")), {**QKV, **GATE_UP},
            unasked=rf"{plain}|.*patch_embedder.*",
        )  # fmt: skip
    raise KeyError(family)


_SUM = re.compile(r"\{(\d+)\+(\d+)\}")
_EXPERT = re.compile(r"(.*\bexperts)\.(?:\d+\.)?\w+")


def modules(seen: View, names: Iterable[str], version: str) -> list[EngineModule]:
    """The engine's modules for checkpoint modules that hold matrices."""
    members: dict[str, list[str]] = {}
    shards: dict[str, tuple[str, ...]] = {}
    for name in names:
        if re.fullmatch(seen.unasked, name):
            continue
        spelled = name
        for pattern, to in seen.renames:
            spelled = re.sub(pattern, to, spelled)
        spelled = _SUM.sub(lambda m: str(int(m[1]) + int(m[2])), spelled)
        expert = _EXPERT.fullmatch(spelled)
        if expert is not None:
            looked_up = seen.experts or (("w1", "w3", "w2") if version == "0.33" else View().experts)
            engine, parts = expert[1], tuple(f"{expert[1]}.0.{leaf}" for leaf in looked_up)
        else:
            engine, parts = _dense(seen, spelled)
        members.setdefault(engine, []).append(name)
        shards[engine] = parts
    kinds = {name: "FusedMoE" if name.endswith("experts") else "ColumnParallelLinear" for name in members}
    return [EngineModule(name, kinds[name], shards[name], tuple(found)) for name, found in members.items()]


def _dense(seen: View, name: str) -> tuple[str, tuple[str, ...]]:
    parent, _, leaf = name.rpartition(".")
    for table, listed in ((seen.fused, True), (seen.opaque, False)):
        for fused, parts in table.items():
            if leaf in parts and re.fullmatch(seen.where.get(fused, ".*"), parent):
                engine = f"{parent}.{fused}"
                return engine, tuple(f"{parent}.{part}" for part in parts) if listed else (engine,)
            tail = next((part for part in parts if "." in part and name.endswith(f".{part}")), None)
            if tail is not None:
                parent = name.removesuffix(f".{tail}")
                return f"{parent}.{fused}", tuple(f"{parent}.{part}" for part in parts)
    return name, (name,)
