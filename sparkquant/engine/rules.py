"""How vLLM reads a compressed-tensors config: renamed modules, fused modules, ignore lists and targets, per version.

A checkpoint names modules as Hugging Face does; the engine renames and fuses them before it asks its config about them:

    model.language_model.layers.0.self_attn.q_proj    (checkpoint)
    language_model.model.layers.0.self_attn.qkv_proj  (engine, with the shards ...q_proj, ...k_proj, ...v_proj)

The functions here repeat what the shipped code of each version does with those names; nothing is imported from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sparkquant.engine.kernels import Route, atomic_add_applies, marlin_padding, route
from sparkquant.engine.patterns import Entries, Pattern

__all__ = [
    "GENERIC", "MODELS", "VERSIONS", "EngineModel", "EngineModule", "Entries", "Ignored", "Pattern", "Route",
    "atomic_add_applies", "engine_modules", "ignored", "marlin_padding", "matched_target", "route",
]  # fmt: skip

NAME, CLASS, FUSED = "name", "class", "fused"

VERSIONS: Mapping[str, tuple[str, str, str]] = {
    "0.25": (NAME, CLASS, FUSED),
    "0.26": (NAME, CLASS, FUSED),
    "0.33": (NAME, FUSED, CLASS),
}
"""Versions whose rules were read, each with the order in which a target is looked for."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """How one model class of the engine names its modules.

    fused      fused leaf name -> leaf names of its shards, in the engine's order
    renames    (checkpoint prefix, engine prefix); the first that fits is applied
    unquantized  module names (regex, checkpoint spelling) that are built without a quantization config
    """

    fused: Mapping[str, tuple[str, ...]]
    renames: tuple[tuple[str, str], ...]
    unquantized: re.Pattern[str]

    def engine_name(self, module: str) -> str:
        """A checkpoint's module name in the engine's spelling."""
        return self._rename(f"{module}.").removesuffix(".")

    def engine_entry(self, entry: str) -> str:
        """An entry of a config as the engine compares it: only exact names with a dot are renamed."""
        return entry if entry.startswith("re:") or "." not in entry else self._rename(entry)

    def _rename(self, name: str) -> str:
        for old, new in self.renames:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def takes_scheme(self, module: str) -> bool:
        """Whether the engine asks its quantization config about this module at all."""
        return self.unquantized.fullmatch(module) is None


_Fused = Mapping[str, tuple[str, ...]]
_ATTENTION_MLP: _Fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_DELTA_NET: _Fused = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
_MULTIMODAL = (
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", "language_model.model."),
)
_UNQUANTIZED = re.compile(
    r".*\.mlp\.(?:gate|shared_expert_gate)|.*\.conv1d|.*\.embed_tokens|.*norm\w*|.*\.(?:A_log|dt_bias)"
    r"|.*visual\.(?:patch_embed\.proj|pos_embed)"
)

_TEXT = EngineModel({**_ATTENTION_MLP, **_DELTA_NET}, (), _UNQUANTIZED)
_VL = EngineModel({**_ATTENTION_MLP, **_DELTA_NET}, _MULTIMODAL, _UNQUANTIZED)
_NEXT = EngineModel(_ATTENTION_MLP, (), _UNQUANTIZED)

_GATE_UP: _Fused = {"gate_up_proj": ("gate_proj", "up_proj")}
_LATENT = EngineModel({**_GATE_UP, "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}, (), _UNQUANTIZED)
_KIMI = EngineModel(_GATE_UP, (), _UNQUANTIZED)
_NEMOTRON = EngineModel({"qkv_proj": ("q_proj", "k_proj", "v_proj")}, (("backbone.", "model."),), _UNQUANTIZED)

GENERIC = EngineModel(_ATTENTION_MLP, (), _UNQUANTIZED)
"""For a family whose class was not read: what nearly all of them have in common."""

MODELS: Mapping[str, EngineModel] = {
    "qwen3_next": _NEXT,
    "qwen3_5": _VL,
    "qwen3_5_moe": _VL,
    "qwen3_5_text": _TEXT,
    "qwen3_5_moe_text": _TEXT,
    "deepseek_v3": _LATENT,
    "glm_moe_dsa": _LATENT,
    "kimi_linear": _KIMI,
    "nemotron_h": _NEMOTRON,
}
"""By `model_type` of config.json. Qwen3-Next stores in_proj_qkvz and in_proj_ba fused already: no shards there."""


@dataclass(frozen=True, slots=True)
class EngineModule:
    """One module of the engine.

    name     engine spelling; the fused name where it is fused
    kind     the engine's class name: a class target matches as a part of it
    shards   engine spelling of the unfused parts that decide; the name itself when nothing is fused
    members  checkpoint modules that are loaded into it
    """

    name: str
    kind: str
    shards: tuple[str, ...]
    members: tuple[str, ...]

    @property
    def is_moe(self) -> bool:
        """All experts of a layer."""
        return self.kind == "FusedMoE"


_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)")
_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
_KINDS = {
    "qkv_proj": "QKVParallelLinear",
    "o_proj": "RowParallelLinear",
    "out_proj": "RowParallelLinear",
    "down_proj": "RowParallelLinear",
    "lm_head": "ParallelLMHead",
    "embed_tokens": "VocabParallelEmbedding",
}


def engine_modules(model: EngineModel, modules: Iterable[str]) -> list[EngineModule]:
    """The engine's modules for a checkpoint's modules (names without `.weight`), in order of first appearance."""
    leaf_to_fused = {leaf: fused for fused, leaves in model.fused.items() for leaf in leaves}
    members: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
    for module in modules:
        expert = _EXPERT.fullmatch(module)
        parent, _, leaf = module.rpartition(".")
        if expert is not None:
            name, kind = model.engine_name(expert.group(1)), "FusedMoE"
        elif module.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            name, kind = model.engine_name(parent), "FusedMoE"
        elif leaf in leaf_to_fused:
            fused = leaf_to_fused[leaf]
            name, kind = model.engine_name(f"{parent}.{fused}" if parent else fused), _KINDS.get(fused, "")
            kind = kind or "MergedColumnParallelLinear"
        else:
            name, kind = model.engine_name(module), _KINDS.get(leaf, "ColumnParallelLinear")
        members.setdefault(name, []).append(module)
        kinds[name] = kind
    return [EngineModule(n, kinds[n], _shards(model, n, kinds[n]), tuple(found)) for n, found in members.items()]


def _shards(model: EngineModel, name: str, kind: str) -> tuple[str, ...]:
    if kind == "FusedMoE":
        return tuple(f"{name}.0.{part}" for part in _EXPERT_PARTS)  # the engine looks at expert 0 alone
    parent, _, leaf = name.rpartition(".")
    return tuple(f"{parent}.{shard}" for shard in model.fused.get(leaf, (leaf,))) if parent else (name,)


class Ignored(StrEnum):
    """What an ignore list says of a module; `partial` stops the engine with a ValueError."""

    YES = "yes"
    NO = "no"
    PARTIAL = "partial"


def ignored(module: EngineModule, ignore: Entries, version: str) -> Ignored:
    """Whether the engine leaves a module unquantized because of its ignore list."""
    if not module.is_moe and module.shards != (module.name,):
        by_fused_name = VERSIONS[version][1] == FUSED
        if ignore.first(module.name, exact_only=not by_fused_name) is not None:
            return Ignored.YES
    found = {ignore.first(shard) is not None for shard in module.shards}
    if len(found) > 1:
        return Ignored.PARTIAL
    return Ignored.YES if found == {True} else Ignored.NO


def matched_target(module: EngineModule, targets: Entries, version: str) -> list[int | None]:
    """Position of the target that the engine takes for a module; None when none matches: it is then unquantized.

    One element for a Linear; one for each of gate, up and down for experts, which the engine looks up apart.
    """
    if module.is_moe:
        # A target "Linear" stands for experts too; no other class name does.
        linear = targets.first_class("Linear") if targets.first("Linear", exact_only=True) is not None else None
        fallback = targets.first_class(module.kind) if linear is None else linear
        named = [targets.first(shard) for shard in module.shards]
        return [fallback if found is None else found for found in named]
    for step in VERSIONS[version]:
        found = _step(step, module, targets)
        if found is not None:
            return [found]
    return [None]


def _step(step: str, module: EngineModule, targets: Entries) -> int | None:
    if step == NAME:
        return targets.first(module.name)
    if step == CLASS:
        return targets.first_class(module.kind)
    shards = [targets.first(shard) for shard in module.shards]
    return shards[0] if None not in shards else None
