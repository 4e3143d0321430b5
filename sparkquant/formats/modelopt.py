"""ModelOpt checkpoints: one algorithm for everything that is not excluded, or `quantized_layers` by name.

The block stands in config.json (`quantization_config`), in hf_quant_config.json, or in both. NVFP4 keeps a multiplier
(`weight_scale_2`) where compressed-tensors keeps a divisor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkquant.checkpoint import Checkpoint
from sparkquant.engine.rules import EngineModel, EngineModule, Ignored
from sparkquant.engine.skipping import ModelOptExclusions, modelopt_entries
from sparkquant.formats.declaration import (
    FORMAT,
    MALFORMED,
    MAX_ENTRIES,
    UNSUPPORTED,
    Answer,
    Declaration,
    Fault,
    Group,
    kind_of,
    modules_by_group,
    texts,
)  # fmt: skip
from sparkquant.formats.storage import Storage
from sparkquant.formats.stored import StoredModule, StoredScheme
from sparkquant.schemes import NVFP4_BLOCK, SCHEMES

QUANT_METHODS = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed")
SIDE_FILE = "hf_quant_config.json"
MIXED = "MIXED_PRECISION"

ALGORITHMS: Mapping[str, StoredScheme] = {
    "NVFP4": StoredScheme(SCHEMES["nvfp4a16"], inputs="static", storage=Storage.MODELOPT),
    "W4A16_NVFP4": StoredScheme(SCHEMES["nvfp4a16"], storage=Storage.MODELOPT),
    "FP8": StoredScheme(SCHEMES["fp8"], per_tensor=True, inputs="static", storage=Storage.MODELOPT),
    "FP8_PER_CHANNEL_PER_TOKEN": StoredScheme(SCHEMES["fp8"], inputs="dynamic", storage=Storage.MODELOPT),
}
"""By `quant_algo`. NVFP4 runs with 4-bit activations whose scale is stored, W4A16_NVFP4 with weights alone."""


def block_of(side_file: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` that hf_quant_config.json stands for."""
    inner = side_file.get("quantization")
    return {"quant_method": "modelopt", **(inner if isinstance(inner, Mapping) else {})}


@dataclass(frozen=True)
class _Excluding:
    """One algorithm, and a list of modules without it."""

    group: Group
    excluded: tuple[str, ...]
    _rules: dict[int, ModelOptExclusions] = field(default_factory=dict, compare=False)

    @property
    def entries(self) -> Sequence[str]:
        return self.excluded

    def answer(self, model: EngineModel, module: EngineModule) -> Answer:
        if id(model) not in self._rules:
            self._rules[id(model)] = ModelOptExclusions(modelopt_entries(model, self.excluded))
        state = self._rules[id(model)].answer(module)
        return state, (self.group,) if state is Ignored.NO else ()

    def group_of(self, module: str) -> Group | None:  # noqa: ARG002
        return self.group


@dataclass(frozen=True)
class _Layers:
    """MIXED_PRECISION: what is listed is quantized."""

    layers: Mapping[str, Group]
    _renamed: dict[int, dict[str, Group]] = field(default_factory=dict, compare=False)
    _experts: dict[int, dict[str, set[Group]]] = field(default_factory=dict, compare=False)

    @property
    def entries(self) -> Sequence[str]:
        return ()

    def answer(self, model: EngineModel, module: EngineModule) -> Answer:
        names = self._names(model)
        if module.name in names:
            return Ignored.NO, (names[module.name],)
        if module.is_moe:
            found: list[Group | None] = list(self._experts[id(model)].get(module.name, ()))
        else:
            found = [names.get(shard) for shard in module.shards]
        if not any(found):
            return Ignored.YES, ()
        return (Ignored.PARTIAL, ()) if None in found else (Ignored.NO, tuple(dict.fromkeys(found)))

    def _names(self, model: EngineModel) -> dict[str, Group]:
        if id(model) not in self._renamed:
            names = {model.engine_name(name): group for name, group in self.layers.items()}
            experts: dict[str, set[Group]] = {}
            for name, group in names.items():
                if ".experts." in name:
                    experts.setdefault(f"{name.partition('.experts.')[0]}.experts", set()).add(group)
            self._renamed[id(model)], self._experts[id(model)] = names, experts
        return self._renamed[id(model)]

    def group_of(self, module: str) -> Group | None:
        group = self.layers.get(module)
        while group is None and "." in module:  # a fused expert tensor, or a whole block that is listed
            module = module.rpartition(".")[0]
            group = self.layers.get(module)
        return group


def declared(checkpoint: Checkpoint, block: Any) -> Declaration:
    """What the block says, and whether hf_quant_config.json says the same."""
    from sparkquant.formats import side_block

    faults: list[Fault] = []
    if not isinstance(block, Mapping):
        return Declaration(faults=(Fault(MALFORMED, "quantization_config", f"is {kind_of(block)}, not an object"),))
    block = block if "quant_algo" in block or not isinstance(block.get("quantization"), Mapping) else block_of(block)
    algorithm = block.get("quant_algo")
    beside = side_block(checkpoint)
    said = beside.get("quant_algo") if beside is not None else None
    if said is not None and algorithm is not None and said != algorithm:
        what = f"says {str(said)[:40]!r}, config.json says {str(algorithm)[:40]!r}"
        faults.append(Fault(FORMAT, f"{SIDE_FILE}: quant_algo", what))
    if algorithm is None:
        algorithm = said if said is not None else _by_groups(block)
    cache = bool(block.get("kv_cache_scheme") or block.get("kv_cache_quant_algo"))
    if algorithm == MIXED:
        layers = _layers(block, beside or {}, faults)
        groups = tuple(dict.fromkeys(layers.values()))
        return Declaration(groups, (), cache, tuple(faults), _Layers(layers))
    scheme = _scheme(algorithm, block.get("group_size"), "quant_algo", faults)
    excluded = texts(block.get("exclude_modules", block.get("ignore")), "ignore", faults)
    group = Group(str(algorithm), (), scheme, str(algorithm))
    return Declaration((group,), (), cache, tuple(faults), _Excluding(group, excluded))


def _by_groups(block: Mapping[str, Any]) -> str | None:
    """Newer exports repeat the algorithm as config_groups in the manner of compressed-tensors."""
    groups = block.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping) or weights.get("type") != "float":
        return None
    if weights.get("num_bits") == 4:
        return "NVFP4" if first.get("input_activations") else "W4A16_NVFP4"  # type: ignore[union-attr]
    return "FP8" if weights.get("num_bits") == 8 else None


def _scheme(algorithm: Any, size: Any, where: str, faults: list[Fault]) -> StoredScheme | None:
    scheme = ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    if scheme is None:
        what = f"is {str(algorithm)[:40]!r}; {', '.join((*ALGORITHMS, MIXED))} can be read"
        faults.append(Fault(UNSUPPORTED, where, what))
    elif scheme.scheme.name == "nvfp4a16" and size not in (None, NVFP4_BLOCK):
        faults.append(Fault(UNSUPPORTED, "group_size", f"is {str(size)[:40]}: NVFP4 has blocks of {NVFP4_BLOCK}"))
        return None
    return scheme


def _layers(block: Mapping[str, Any], beside: Mapping[str, Any], faults: list[Fault]) -> dict[str, Group]:
    listed = block.get("quantized_layers", beside.get("quantized_layers"))
    if not isinstance(listed, Mapping) or len(listed) > MAX_ENTRIES:
        faults.append(Fault(MALFORMED, "quantized_layers", f"is {kind_of(listed)}: {MIXED} needs one entry a layer"))
        return {}
    found: dict[str, Group] = {}
    known: dict[tuple[str, str], Group] = {}
    for name, fields in listed.items():
        algorithm = fields.get("quant_algo") if isinstance(fields, Mapping) else None
        size = fields.get("group_size") if isinstance(fields, Mapping) else None
        key = (str(algorithm), str(size))
        if key not in known:
            scheme = _scheme(algorithm, size, f"quantized_layers.{str(name)[:200]}.quant_algo", faults)
            known[key] = Group(key[0], (), scheme, key[0])
        found[name] = known[key]
    return found


def modules(checkpoint: Checkpoint) -> Mapping[str, StoredModule]:
    """Every module, with the algorithm of its name where its tensors are of the quantized kind."""
    from sparkquant.formats import quantization_of

    return modules_by_group(checkpoint, declared(checkpoint, quantization_of(checkpoint)).names)
