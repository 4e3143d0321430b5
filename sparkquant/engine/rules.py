"""How vLLM reads a compressed-tensors config: renamed modules, fused modules, ignore lists and targets, per version.

A checkpoint names modules as Hugging Face does; the engine renames and fuses them before it asks its config about them:

    model.language_model.layers.0.self_attn.q_proj    (checkpoint)
    language_model.model.layers.0.self_attn.qkv_proj  (engine, with the shards ...q_proj, ...k_proj, ...v_proj)

The functions here repeat what the shipped code of each version does with those names; nothing is imported from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sparkquant.engine.kernels import Route, atomic_add_applies, marlin_padding, route
from sparkquant.engine.patterns import Entries, Pattern

__all__ = [
    "VERSIONS", "EngineModel", "EngineModule", "Entries", "Ignored", "Pattern", "Route",
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
    """How one model class of one engine version names its modules.

    fused      fused leaf name -> leaf names of its shards, in the engine's order
    renames    (checkpoint prefix, engine prefix); the first that fits is applied, to exact entries of a config too
    unquantized  module names (checkpoint spelling) that are built without a quantization config
    asked      (regex, replacement) on names of modules alone: the spelling in which the config is asked where it is not
               that of the weights; `{24+3}` in the result is a sum
    opaque     fused leaves that the class builds but does not list: only their own name is looked up
    where      fused leaf -> regex of its parent (checkpoint spelling), where other modules hold leaves of those names
    experts    leaf names under which expert 0 is looked up
    """

    fused: Mapping[str, tuple[str, ...]]
    renames: tuple[tuple[str, str], ...]
    unquantized: re.Pattern[str]
    asked: tuple[tuple[str, str], ...] = ()
    opaque: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")

    def engine_name(self, module: str) -> str:
        """A checkpoint's module name in the engine's spelling."""
        name = self._rename(f"{module}.").removesuffix(".")
        for pattern, to in self.asked:
            name = re.sub(pattern, to, name)
        return _SUM.sub(lambda found: str(int(found[1]) + int(found[2])), name) if "{" in name else name

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

    def fusion(self, module: str) -> tuple[str, str, tuple[str, ...]]:
        """(parent, leaf, shards) of the module that a checkpoint's module is loaded into; no shards: its own name."""
        parent, _, leaf = module.rpartition(".")
        for table in (self.fused, self.opaque):
            for fused, parts in table.items():
                part = next((part for part in parts if module == part or module.endswith(f".{part}")), None)
                above = parent if part is None else module.removesuffix(part).removesuffix(".")
                if part is not None and re.fullmatch(self.where.get(fused, ".*"), above):
                    return above, fused, parts if table is self.fused else ()
        return parent, leaf, ()


_SUM = re.compile(r"\{(\d{1,9})\+(\d{1,9})\}")


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
    members: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
    shards: dict[str, tuple[str, ...]] = {}
    for module in modules:
        expert = _EXPERT.fullmatch(module)
        if expert is not None or module.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            name = model.engine_name(expert[1] if expert is not None else module.rpartition(".")[0])
            kinds[name] = "FusedMoE"
            shards[name] = tuple(f"{name}.0.{part}" for part in model.experts)  # the engine looks at expert 0 alone
        else:
            parent, leaf, parts = model.fusion(module)
            name = model.engine_name(f"{parent}.{leaf}" if parent else leaf)
            merged = leaf != module.rpartition(".")[2]
            kinds[name] = _KINDS.get(leaf, "MergedColumnParallelLinear" if merged else "ColumnParallelLinear")
            above = name.rpartition(".")[0]
            shards[name] = tuple(f"{above}.{part}" if above else part for part in parts) or (name,)
        members.setdefault(name, []).append(module)
    return [EngineModule(name, kinds[name], shards[name], tuple(found)) for name, found in members.items()]


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
