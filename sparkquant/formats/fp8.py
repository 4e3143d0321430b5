"""FP8 checkpoints of `quant_method: fp8`: scales by block (`weight_scale_inv`) or one for the whole matrix.

Everything is quantized but what `modules_to_not_convert` names letter by letter, and lm_head, which the engine never
quantizes here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    kind_of,
    modules_by_group,
    texts,
)  # fmt: skip
from sparkquant.formats.storage import Storage
from sparkquant.formats.stored import StoredModule, StoredScheme
from sparkquant.schemes import FP8_BLOCK, SCHEMES

QUANT_METHODS = ("fp8",)


@dataclass(frozen=True)
class _Skipping:
    """Everything is quantized but the entries."""

    group: Group
    entries: Sequence[str]
    _rules: dict[int, Listed] = field(default_factory=dict, compare=False)

    def answer(self, model: EngineModel, module: EngineModule) -> Answer:
        if id(model) not in self._rules:
            self._rules[id(model)] = Listed([model.engine_entry(entry) for entry in self.entries])
        if module.kind == "ParallelLMHead":
            return Ignored.YES, ()
        state = self._rules[id(model)].answer(module)
        return state, (self.group,) if state is Ignored.NO else ()

    def group_of(self, module: str) -> Group | None:  # noqa: ARG002
        return self.group


def declared(checkpoint: Checkpoint, block: Any) -> Declaration:  # noqa: ARG001
    """What the block says."""
    faults: list[Fault] = []
    if not isinstance(block, Mapping):
        return Declaration(faults=(Fault(MALFORMED, "quantization_config", f"is {kind_of(block)}, not an object"),))
    size = block.get("weight_block_size")
    activations = block.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        faults.append(Fault(MALFORMED, "activation_scheme", f"is {str(activations)[:40]!r}, not dynamic or static"))
    scheme: StoredScheme | None = None
    if block.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        faults.append(Fault(UNSUPPORTED, "fmt", f"is {str(block['fmt'])[:40]!r}: e4m3 can be read"))
    elif size is None:
        inputs = "static" if activations == "static" else "dynamic"
        scheme = StoredScheme(SCHEMES["fp8"], True, inputs, Storage.FP8)
    elif size == [FP8_BLOCK, FP8_BLOCK]:
        scheme = StoredScheme(SCHEMES["fp8_block"], inputs="dynamic", storage=Storage.FP8)
    else:
        what = f"is {str(size)[:40]}: only [{FP8_BLOCK}, {FP8_BLOCK}] can be read"
        faults.append(Fault(UNSUPPORTED, "weight_block_size", what))
    listed = block.get("modules_to_not_convert")
    entries = texts(block.get("ignored_layers") if listed is None else listed, "modules_to_not_convert", faults)
    group = Group("fp8", (), scheme, "fp8")
    return Declaration((group,), (), False, tuple(faults), _Skipping(group, entries))


def modules(checkpoint: Checkpoint) -> Mapping[str, StoredModule]:
    """Every module, with the one scheme where its tensors are of the quantized kind."""
    from sparkquant.formats import quantization_of

    return modules_by_group(checkpoint, declared(checkpoint, quantization_of(checkpoint)).names)
