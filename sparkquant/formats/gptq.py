"""GPTQ checkpoints: qweight, qzeros, scales and perhaps g_idx, in the first format (zeros less one) or the second.

vLLM derives what is quantized from the files unless `modules_in_block_to_quantize` says it, so that a config can only
contradict its files through that list, `lm_head` and `dynamic`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkquant.checkpoint import Checkpoint
from sparkquant.engine.patterns import Budget, Pattern
from sparkquant.engine.rules import EngineModel, EngineModule, Ignored
from sparkquant.engine.skipping import GptqLayers, agreed
from sparkquant.formats.declaration import (
    ACTORDER,
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
from sparkquant.formats.storage import Storage
from sparkquant.formats.stored import StoredModule, StoredScheme, modules_of
from sparkquant.schemes import DTYPE_BYTES, SCHEMES

QUANT_METHODS = ("gptq", "gptqmodel")
PLAIN_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Derived:
    """What is stored quantized is read quantized; `dynamic` takes modules out again."""

    group: Group
    layers: tuple[str, ...]
    head: bool
    excluded: tuple[Pattern, ...] = ()
    _rules: dict[int, GptqLayers] = field(default_factory=dict, compare=False)

    @property
    def entries(self) -> Sequence[str]:
        return ()

    def answer(self, model: EngineModel, module: EngineModule) -> Answer:
        if id(model) not in self._rules:
            self._rules[id(model)] = GptqLayers(map(model.engine_entry, self.layers))
        if module.kind == "ParallelLMHead":
            return (Ignored.NO, (self.group,)) if self.head else (Ignored.YES, ())
        names = (module.name,) if module.is_moe else module.shards
        state = agreed(any(pattern.matches(name) for pattern in self.excluded) for name in names)
        if state is Ignored.NO:
            state = self._rules[id(model)].answer(module)
        return state, (self.group,) if state is Ignored.NO else ()

    def group_of(self, module: str) -> Group | None:  # noqa: ARG002
        return self.group


def declared(checkpoint: Checkpoint, block: Any) -> Declaration:
    """What the block says; the list of quantized modules comes from the files where the block has none."""
    faults: list[Fault] = []
    if not isinstance(block, Mapping):
        return Declaration(faults=(Fault(MALFORMED, "quantization_config", f"is {kind_of(block)}, not an object"),))
    scheme = integer_scheme(block, _storage(block, faults), faults)
    if take(block, "desc_act", bool, False, faults) and block.get("group_size") != -1:
        what = "is true: newer engines refuse an activation order with groups"
        faults.append(Fault(ACTORDER, "desc_act", what))
    listed = block.get("modules_in_block_to_quantize")
    flat = [name for part in listed for name in (part if isinstance(part, list) else [part])] if isinstance(
        listed, list) else listed  # fmt: skip
    layers = texts(flat, "modules_in_block_to_quantize", faults) or tuple(quantized_by_dtype(checkpoint))
    group = Group("gptq", (), scheme, "gptq")
    budget = Budget()
    dynamic = block.get("dynamic")
    keys = [key for key in dynamic if isinstance(key, str)] if isinstance(dynamic, Mapping) else []
    if any(not key.startswith("-:") for key in keys):
        what = "gives modules settings of their own: such a file cannot be read here"
        faults.append(Fault(UNSUPPORTED, "dynamic", what))
    excluded = tuple(Pattern(f"re:{key[2:]}", budget) for key in keys if key.startswith("-:"))
    head = take(block, "lm_head", bool, False, faults)
    return Declaration((group,), (), False, tuple(faults), Derived(group, layers, head, excluded))


def _storage(block: Mapping[str, Any], faults: list[Fault]) -> Storage:
    form = block.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        faults.append(Fault(UNSUPPORTED, "checkpoint_format", f"is {str(form)[:40]!r}; gptq and gptq_v2 can be read"))
    return Storage.GPTQ_V2 if form == "gptq_v2" else Storage.GPTQ


def integer_scheme(block: Mapping[str, Any], storage: Storage, faults: list[Fault]) -> StoredScheme | None:
    """`bits`, `group_size` and `sym` as a scheme. Zero points are always stored, also where they are all the same."""
    bits = take(block, "bits", int, 4, faults)
    symmetric = take(block, "sym", bool, True, faults)
    size = integer_group_size(block.get("group_size", 128), "group_size", faults)
    if bits not in (4, 8):
        faults.append(Fault(UNSUPPORTED, "bits", f"is {bits}: 4 and 8 can be read"))
        return None
    if size is None:
        return None
    base = SCHEMES["w4a16" if bits == 4 else "w8a16"]
    return StoredScheme(replace(base, group_size=size, symmetric=symmetric), storage=storage)


def quantized_by_dtype(checkpoint: Checkpoint) -> list[str]:
    """The modules that vLLM takes for quantized because a tensor of theirs is no 16- or 32-bit float."""
    return [
        name
        for name, tensors in modules_of(checkpoint.tensors).items()
        if any(t.dtype not in PLAIN_DTYPES and t.dtype in DTYPE_BYTES for t in tensors.values())
    ]


def modules(checkpoint: Checkpoint) -> Mapping[str, StoredModule]:
    """Every module, with the one scheme where its tensors are of the quantized kind."""
    from sparkquant.formats import quantization_of

    return modules_by_group(checkpoint, declared(checkpoint, quantization_of(checkpoint)).names)
