"""AutoRound checkpoints: the packing of GPTQ (first format) or AWQ, with settings by block, by name and by pattern.

`packing_format` says which; what AutoRound exports as `llm_compressor` is a compressed-tensors checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkquant.checkpoint import Checkpoint
from sparkquant.engine.patterns import Budget, Pattern
from sparkquant.engine.rules import EngineModel, EngineModule, Ignored
from sparkquant.engine.skipping import LayerSettings
from sparkquant.formats.declaration import (
    MALFORMED,
    MAX_ENTRIES,
    UNSUPPORTED,
    Answer,
    Declaration,
    Fault,
    Group,
    kind_of,
    modules_by_group,
    take,
    texts,
)  # fmt: skip
from sparkquant.formats.gptq import integer_scheme
from sparkquant.formats.storage import Storage
from sparkquant.formats.stored import StoredModule

QUANT_METHODS = ("auto-round", "auto_round", "intel/auto-round")
PACKINGS: Mapping[str, Storage] = {
    "auto_round:auto_gptq": Storage.GPTQ,
    "auto_gptq": Storage.GPTQ,
    "auto_round:auto_awq": Storage.AWQ,
    "auto_awq": Storage.AWQ,
    "auto_round:gptqmodel": Storage.GPTQ_V2,
    "auto_round": Storage.GPTQ_V2,
}
_PATTERN_CHARACTERS = frozenset("*+?^$()[]{}|\\")

Setting = tuple[int, int, bool]
"""bits, group size, symmetric; 16 bits are plain."""


@dataclass(frozen=True)
class _Settings:
    """Everything inside the blocks is quantized, and each name may have a setting of its own."""

    groups: Mapping[Setting, Group]
    exact: Mapping[str, Setting]
    patterns: Sequence[tuple[Pattern, Setting]]
    blocks: tuple[str, ...]
    chosen: Setting
    _rules: dict[int, LayerSettings[Setting]] = field(default_factory=dict, compare=False)

    @property
    def entries(self) -> Sequence[str]:
        return ()

    @property
    def _plain(self) -> Setting:
        return (16, *self.chosen[1:])

    def answer(self, model: EngineModel, module: EngineModule) -> Answer:
        if id(model) not in self._rules:
            exact = {model.engine_entry(name): setting for name, setting in self.exact.items()}
            # A block's name has no dot behind it: `model.language_model.layers` is mapped like the names below it.
            blocks = [model.engine_name(f"{block}.").removesuffix(".") for block in self.blocks]
            rules = LayerSettings(exact, self.patterns, blocks, self.chosen, self._plain)
            self._rules[id(model)] = rules
        found = sorted(self._rules[id(model)].settings(module))
        plain = [setting[0] >= 16 for setting in found]
        if all(plain):
            return Ignored.YES, ()
        if any(plain):
            return Ignored.PARTIAL, ()
        return Ignored.NO, tuple(self.groups.get(setting) for setting in found)

    def group_of(self, module: str) -> Group | None:
        setting = self.exact.get(module)
        if setting is None:
            setting = next((value for pattern, value in self.patterns if pattern.matches(module)), self.chosen)
        return self.groups.get(setting)


def declared(checkpoint: Checkpoint, block: Any) -> Declaration:  # noqa: ARG001
    """What the block says."""
    faults: list[Fault] = []
    if not isinstance(block, Mapping):
        return Declaration(faults=(Fault(MALFORMED, "quantization_config", f"is {kind_of(block)}, not an object"),))
    packing = block.get("packing_format", block.get("backend", "auto_round:auto_gptq"))
    storage = PACKINGS.get(packing) if isinstance(packing, str) else None
    if storage is None:
        what = f"is {str(packing)[:40]!r}; {', '.join(PACKINGS)} can be read"
        faults.append(Fault(UNSUPPORTED, "packing_format", what))
    kind = block.get("data_type", "int")
    if kind != "int" or take(block, "act_bits", int, 16, faults) < 16:
        faults.append(Fault(UNSUPPORTED, "data_type", f"is {str(kind)[:40]!r}: integer weights alone can be read"))
        storage = None
    bits = take(block, "bits", int, 4, faults)
    size = take(block, "group_size", int, 128, faults)
    chosen = (bits, size, take(block, "sym", bool, True, faults))
    exact, patterns = _extra(block.get("extra_config"), chosen, faults)
    groups = {
        setting: _group(setting, storage, faults)
        for setting in dict.fromkeys((chosen, *exact.values(), *(setting for _, setting in patterns)))
        if setting[0] < 16
    }
    names = _Settings(groups, exact, patterns, _blocks(block, faults), chosen)
    return Declaration(tuple(groups.values()), (), False, tuple(faults), names)


def _blocks(block: Mapping[str, Any], faults: list[Fault]) -> tuple[str, ...]:
    """A text with commas, or a list; older exports call it `to_quant_block_names`, a list of lists."""
    value = block.get("block_name_to_quantize", block.get("to_quant_block_names"))
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list) and any(isinstance(part, list) for part in value):
        inner = [item for part in value for item in (part if isinstance(part, list) else [part])]
        value = sorted({name.rpartition(".")[0] if name.rpartition(".")[2].isdecimal() else name
                        for name in inner if isinstance(name, str)})  # fmt: skip
    return texts(value, "block_name_to_quantize", faults)


def _extra(
    extra: Any, chosen: Setting, faults: list[Fault]
) -> tuple[dict[str, Setting], list[tuple[Pattern, Setting]]]:
    exact: dict[str, Setting] = {}
    patterns: list[tuple[Pattern, Setting]] = []
    if extra is None:
        return exact, patterns
    if not isinstance(extra, Mapping) or len(extra) > MAX_ENTRIES:
        faults.append(Fault(MALFORMED, "extra_config", f"is {kind_of(extra)}, not an object"))
        return exact, patterns
    budget = Budget()
    for name, fields in extra.items():
        where = f"extra_config.{name[:200]}."
        if not isinstance(fields, Mapping):
            faults.append(Fault(MALFORMED, where[:-1], f"is {kind_of(fields)}, not an object"))
            continue
        setting = (
            take(fields, "bits", int, chosen[0], faults, where),
            take(fields, "group_size", int, chosen[1], faults, where),
            take(fields, "sym", bool, chosen[2], faults, where),
        )
        exact[name] = setting
        if _PATTERN_CHARACTERS & set(name):
            pattern = Pattern(f"re:.*(?:{name})", budget)
            patterns.append((pattern, setting))
            if pattern.fault:
                faults.append(Fault(MALFORMED, where[:-1], pattern.fault))
    return exact, patterns


def _group(setting: Setting, storage: Storage | None, faults: list[Fault]) -> Group:
    bits, size, symmetric = setting
    fields = {"bits": bits, "group_size": size, "sym": symmetric}
    scheme = integer_scheme(fields, storage, faults) if storage is not None else None
    if scheme is not None and storage is Storage.AWQ and bits != 4:
        faults.append(Fault(UNSUPPORTED, "bits", f"is {bits}: AWQ has 4"))
        scheme = None
    name = f"{bits} bits, groups of {size}"
    return Group(name, (), scheme, "auto-round")


def modules(checkpoint: Checkpoint) -> Mapping[str, StoredModule]:
    """Every module, with the setting of its name where its tensors are of the quantized kind."""
    from sparkquant.formats import quantization_of

    return modules_by_group(checkpoint, declared(checkpoint, quantization_of(checkpoint)).names)
