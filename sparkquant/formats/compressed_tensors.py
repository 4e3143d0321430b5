"""The compressed-tensors `quantization_config`: groups of targets with a scheme each, and an ignore list.

Read without the compressed-tensors package, because that refuses a whole config at its first fault; here every fault is
found and named, and what can be understood is understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkquant.checkpoint import Checkpoint
from sparkquant.engine.patterns import Budget, Entries, Pattern
from sparkquant.formats.declaration import (
    ACTORDER,
    FORMAT,
    MALFORMED,
    UNSUPPORTED,
    Declaration,
    Fault,
    Group,
    kind_of,
    texts,
)  # fmt: skip
from sparkquant.formats.stored import StoredModule, StoredScheme, modules_of
from sparkquant.schemes import FP8_BLOCK, NVFP4_BLOCK, SCHEMES

QUANT_METHODS = ("compressed-tensors",)
MIXED = "mixed-precision"


def declared(checkpoint: Checkpoint, block: Any) -> Declaration:  # noqa: ARG001
    """See `declaration`: the tensors do not matter here."""
    return declaration(block)


COMPRESSED = "compressed"
"""The `quantization_status` of weights that are stored as their format says."""


def declaration(block: Any) -> Declaration:
    """Read a `quantization_config`. Never raises: a strange value is a Fault."""
    faults: list[Fault] = []
    if not isinstance(block, Mapping):
        return Declaration(faults=(Fault(MALFORMED, "quantization_config", f"is {kind_of(block)}, not an object"),))
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        faults.append(Fault(MALFORMED, "config_groups", f"is {kind_of(groups)}: at least one group is needed"))
        groups = {}
    shared = block.get("format")
    if not isinstance(shared, str):
        faults.append(Fault(MALFORMED, "format", f"is {kind_of(shared)}, not a text"))
        shared = ""
    found = tuple(_group(f"config_groups.{name}", name, value, shared, faults) for name, value in groups.items())
    ignore = texts(block.get("ignore", []), "ignore", faults)
    formats = {group.format for group in found if group.format}
    if shared != MIXED and formats - {shared}:
        needed = MIXED if len(formats) > 1 else formats.copy().pop()
        what = f"is {shared!r}, but the groups use {', '.join(sorted(formats))}: it must be {needed!r}"
        faults.append(Fault(FORMAT, "format", what))
    status = block.get("quantization_status")
    if found and status not in (None, COMPRESSED):
        what = f"is {str(status)[:40]!r}: loaders then take packed weights for plain ones; it must be {COMPRESSED!r}"
        faults.append(Fault(UNSUPPORTED, "quantization_status", what))
    return Declaration(found, ignore, bool(block.get("kv_cache_scheme")), tuple(faults))


def _group(where: str, name: str, value: Any, shared: str, faults: list[Fault]) -> Group:
    if not isinstance(value, Mapping):
        faults.append(Fault(MALFORMED, where, f"is {kind_of(value)}, not an object"))
        return Group(name, (), None, "")
    targets = texts(value.get("targets"), f"{where}.targets", faults)
    if not targets:
        faults.append(Fault(MALFORMED, f"{where}.targets", "is empty: the group can never apply"))
    own = value.get("format")
    if own is not None and not isinstance(own, str):
        faults.append(Fault(MALFORMED, f"{where}.format", f"is {kind_of(own)}, not a text"))
        own = None
    if own is None and shared == MIXED:
        faults.append(Fault(FORMAT, f"{where}.format", f"is absent although the top format is {MIXED!r}"))
    stored_format = own or ("" if shared == MIXED else shared)
    reading = _Arguments(f"{where}.weights", value.get("weights"), faults)
    scheme = reading.scheme(value.get("input_activations"), where)
    if scheme is not None and stored_format and stored_format != scheme.scheme.format:
        what = f"is {stored_format!r}; {scheme.label} is stored as {scheme.scheme.format!r}"
        faults.append(Fault(FORMAT, f"{where}.format", what))
    return Group(name, targets, scheme, stored_format)


class _Arguments:
    """The `weights` of one group, each value checked for its type before it is believed."""

    def __init__(self, where: str, fields: Any, faults: list[Fault]) -> None:
        self.where = where
        self.faults = faults
        self.fields: Mapping[str, Any] = fields if isinstance(fields, Mapping) else {}
        if not isinstance(fields, Mapping):
            faults.append(Fault(MALFORMED, where, f"is {kind_of(fields)}, not an object"))

    def _take(self, key: str, kind: type, default: Any) -> Any:
        value = self.fields.get(key)
        if value is None:
            return default
        if type(value) is not kind:
            self.faults.append(Fault(MALFORMED, f"{self.where}.{key}", f"is {kind_of(value)}"))
            return default
        return value

    def scheme(self, activations: Any, group: str) -> StoredScheme | None:
        """The scheme that these arguments spell; None after a fault."""
        if not self.fields:
            return None
        bits, kind = self._take("num_bits", int, 8), self._take("type", str, "int")
        size, strategy = self._take("group_size", int, None), self._take("strategy", str, None)
        symmetric = self._take("symmetric", bool, True)
        strategy = strategy or ("group" if size is not None and size > 0 else "channel" if size == -1 else "tensor")
        order = self.fields.get("actorder")
        if order not in (None, False, "static", "weight"):
            what = f"is {str(order)[:40]!r}: only a static order is portable, newer engines refuse the others"
            self.faults.append(Fault(ACTORDER, f"{self.where}.actorder", what))
        if self._take("dynamic", bool, False):
            self.faults.append(Fault(UNSUPPORTED, f"{self.where}.dynamic", "weights with dynamic scales store none"))
        inputs = self._inputs(activations, group)
        if kind == "int" and bits in (4, 8) and strategy in ("group", "channel") and inputs == "none":
            return self._integer(bits, strategy, size, symmetric)
        if kind == "float" and bits == 4 and strategy == "tensor_group" and size in (None, NVFP4_BLOCK):
            return StoredScheme(SCHEMES["nvfp4a16"], inputs="none" if inputs == "none" else "static")
        if kind == "float" and bits == 8 and strategy in ("channel", "tensor", "block"):
            return self._fp8(strategy, inputs)
        what = f"{bits}-bit {kind} by {strategy} (group size {size}, activations {inputs}) is no scheme known here"
        self.faults.append(Fault(UNSUPPORTED, self.where, what))
        return None

    def _integer(self, bits: int, strategy: str, size: int | None, symmetric: bool) -> StoredScheme | None:
        width = -1 if strategy == "channel" else size
        if width is None or not (width == -1 or 0 < width < 2**31):
            self.faults.append(Fault(MALFORMED, f"{self.where}.group_size", f"is {size}: a positive number is needed"))
            return None
        base = SCHEMES["w4a16" if bits == 4 else "w8a16"]
        return StoredScheme(replace(base, group_size=width, symmetric=symmetric))

    def _fp8(self, strategy: str, inputs: str) -> StoredScheme | None:
        if strategy == "block":
            block = self.fields.get("block_structure")
            if block != [FP8_BLOCK, FP8_BLOCK]:
                what = f"is {str(block)[:40]}: only [{FP8_BLOCK}, {FP8_BLOCK}] can be read"
                self.faults.append(Fault(UNSUPPORTED, f"{self.where}.block_structure", what))
                return None
            return StoredScheme(SCHEMES["fp8_block"], inputs=inputs)
        return StoredScheme(SCHEMES["fp8"], strategy == "tensor", inputs)

    def _inputs(self, activations: Any, group: str) -> str:
        if activations is None:
            return "none"
        if not isinstance(activations, Mapping):
            self.faults.append(Fault(MALFORMED, f"{group}.input_activations", f"is {kind_of(activations)}"))
            return "none"
        kind, bits = activations.get("type"), activations.get("num_bits")
        if kind != "float" or bits not in (4, 8):
            what = f"are {str(bits)[:20]}-bit {str(kind)[:20]}: engines have kernels for 4- and 8-bit floats here"
            self.faults.append(Fault(UNSUPPORTED, f"{group}.input_activations", what))
        # `local` (NVFP4) computes block scales on the fly, below a stored global one.
        return "dynamic" if activations.get("dynamic") is True else "static"


def modules(checkpoint: Checkpoint) -> Mapping[str, StoredModule]:
    """Every module; a scheme where the first matching target gives one and the tensors are of the quantized kind."""
    from sparkquant.formats import quantization_block

    said = declaration(quantization_block(checkpoint.config))
    budget = Budget()
    targets = Entries((Pattern(text, budget) for group in said.groups for text in group.targets), budget)
    groups = [group for group in said.groups for _ in group.targets]
    by_class = targets.first("Linear", exact_only=True)  # every quantized module is a Linear
    found: dict[str, StoredModule] = {}
    for name, tensors in modules_of(checkpoint.tensors).items():
        module = StoredModule(name, tensors)
        named = targets.first(name)
        position = by_class if named is None else named
        if module.is_quantized and position is not None:
            module = StoredModule(name, tensors, groups[position].scheme)
        found[name] = module
    return found
