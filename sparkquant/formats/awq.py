"""AWQ checkpoints in the layout of the gemm kernel: 4 bits, zero points, words in the order 0 2 4 6 1 3 5 7.

Without `modules_to_not_convert` vLLM derives that list from the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkquant.checkpoint import Checkpoint
from sparkquant.engine.rules import EngineModel, EngineModule, Ignored
from sparkquant.engine.skipping import Listed
from sparkquant.formats.declaration import (
    MALFORMED,
    UNSUPPORTED,
    Answer,
    Declaration,
    Fault,
    Group,
    integer_group_size,
    kind_of,
    modules_by_group,
    take,
    texts,
)  # fmt: skip
from sparkquant.formats.gptq import Derived, quantized_by_dtype
from sparkquant.formats.storage import Storage
from sparkquant.formats.stored import StoredModule, StoredScheme
from sparkquant.schemes import SCHEMES

QUANT_METHODS = ("awq", "awq_marlin")


@dataclass(frozen=True)
class _Skipping:
    """Everything is quantized but what contains one of the entries."""

    group: Group
    entries: Sequence[str]
    head: bool
    _rules: dict[int, Listed] = field(default_factory=dict, compare=False)

    def answer(self, model: EngineModel, module: EngineModule) -> Answer:
        if id(model) not in self._rules:
            self._rules[id(model)] = Listed([model.engine_entry(entry) for entry in self.entries], as_part=True)
        if module.kind == "ParallelLMHead" and not self.head:
            return Ignored.YES, ()
        state = self._rules[id(model)].answer(module)
        return state, (self.group,) if state is Ignored.NO else ()

    def group_of(self, module: str) -> Group | None:  # noqa: ARG002
        return self.group


def declared(checkpoint: Checkpoint, block: Any) -> Declaration:
    """What the block says; the list of plain modules comes from the files where the block has none."""
    faults: list[Fault] = []
    if not isinstance(block, Mapping):
        return Declaration(faults=(Fault(MALFORMED, "quantization_config", f"is {kind_of(block)}, not an object"),))
    bits = take(block, "bits", int, take(block, "w_bit", int, 4, faults), faults)
    size = integer_group_size(block.get("group_size", block.get("q_group_size", 128)), "group_size", faults)
    version = take(block, "version", str, "gemm", faults)
    if bits != 4 or version.lower() != "gemm":
        what = f"is {version[:40]!r} with {bits} bits: only gemm with 4 can be read"
        faults.append(Fault(UNSUPPORTED, "version", what))
        size = None
    scheme = awq_scheme(size, symmetric=not take(block, "zero_point", bool, True, faults)) if size else None
    group = Group("awq", (), scheme, "awq")
    head = take(block, "lm_head", bool, False, faults)
    listed = texts(block.get("modules_to_not_convert"), "modules_to_not_convert", faults)
    names = _Skipping(group, listed, head) if listed else Derived(group, tuple(quantized_by_dtype(checkpoint)), head)
    return Declaration((group,), (), False, tuple(faults), names)


def awq_scheme(size: int, *, symmetric: bool = False) -> StoredScheme:
    """4 bits in groups; zero points are stored in any case."""
    return StoredScheme(replace(SCHEMES["w4a16"], group_size=size, symmetric=symmetric), storage=Storage.AWQ)


def modules(checkpoint: Checkpoint) -> Mapping[str, StoredModule]:
    """Every module, with the one scheme where its tensors are of the quantized kind."""
    from sparkquant.formats import quantization_of

    return modules_by_group(checkpoint, declared(checkpoint, quantization_of(checkpoint)).names)
