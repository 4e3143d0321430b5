"""Sources that are quantized already: seen under their 16-bit names and shapes, dequantized when they are read.

    FP8, NVFP4 or int4 checkpoint -> a view with BF16 `weight`s -> plan and quantize as for any other source

What is quantized again is computed from the exact float32 weights. What is kept is written as BF16. The old
quantization config never survives. 8 bits and more may be made of anything; fewer lose twice, and have to be allowed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkquant.checkpoint import Checkpoint, Computed, TensorHeader
from sparkquant.decisions import Decision
from sparkquant.errors import CheckpointError, Problem, QuantizedSource, UnsupportedFormat

if TYPE_CHECKING:
    from sparkquant.formats.stored import StoredModule

FREE_BITS = 8
"""A result of so many bits may be made from a quantized source without being asked for."""

OLD_CONFIGS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Side files that speak of the old quantization; they are never carried over."""

_KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")
_HINT = "pass the 16-bit checkpoint that it was made from: rounding twice loses more than any record would say"


def as_16_bit(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself when nothing in it is quantized, else its 16-bit view (`computed` holds what is read so).

    Raises QuantizedSource when its config cannot be understood, CheckpointError naming every tensor that is missing.
    """
    if checkpoint.computed or not _may_be_quantized(checkpoint):
        return checkpoint
    from sparkquant import formats
    from sparkquant.formats.stored import split_name

    block = formats.quantization_of(checkpoint)
    signs = [t.name for t in checkpoint.tensors.values() if split_name(t.name)[1] not in ("", "weight")]
    signs += [t.name for t in checkpoint.tensors.values() if t.dtype.startswith("F8_")]
    if block is None and not signs:
        return checkpoint
    method = block.get("quant_method", "unnamed") if isinstance(block, Mapping) else "undeclared"
    found = f"; for instance {signs[0]}" if signs else ""
    what = f"{checkpoint.path} is quantized already (quant_method {method!r}, {len(signs)} quantized tensors{found})"
    try:
        said = formats.declared(checkpoint) if isinstance(block, Mapping) else None
        modules = formats.stored_modules(checkpoint) if said is not None else {}
    except UnsupportedFormat as error:
        raise QuantizedSource(f"{what}, in a format that cannot be read", hint=f"{_HINT}; {error.hint}") from None
    if said is None or said.faults:
        faults = [Problem(fault.where, fault.what) for fault in (said.faults if said is not None else ())]
        raise QuantizedSource(f"{what}, and its config cannot be followed", hint=_HINT, problems=faults)
    undeclared = [name for name, module in modules.items() if module.is_quantized and module.scheme is None]
    if undeclared:
        faults = [Problem(name, "is stored quantized, but the config gives it no scheme") for name in undeclared]
        raise QuantizedSource(what, hint=_HINT, problems=faults)
    return _view(checkpoint, modules, str(method))


def _may_be_quantized(checkpoint: Checkpoint) -> bool:
    """Whether the readers have to be asked: planning a 16-bit source must not pay for their imports."""
    text = checkpoint.text_config
    if any(fields.get("quantization_config") is not None for fields in (checkpoint.config, text)):
        return True
    if (checkpoint.path / OLD_CONFIGS[0]).exists():
        return True
    return any(t.dtype not in ("BF16", "F16", "F32") or "scale" in t.name for t in checkpoint.tensors.values())


def _view(checkpoint: Checkpoint, modules: Mapping[str, StoredModule], method: str) -> Checkpoint:
    tensors: dict[str, TensorHeader] = {}
    computed: dict[str, Computed] = {}
    problems: list[Problem] = []
    for name, module in modules.items():
        if module.scheme is None:
            tensors |= {h.name: h for h in module.tensors.values() if not h.name.endswith(_KV_SCALES)}
            continue
        problems += _misfits(module)
        codes, shape = module.tensors.get(module.scheme.codes), module.shape
        if codes is None or shape is None or problems:
            continue
        weight = f"{name}.weight"
        size = 2 * shape[0] * shape[1]
        tensors[weight] = TensorHeader(weight, "BF16", shape, codes.shard, codes.start, codes.start + size)
        load = partial(_rows, checkpoint, module)
        computed[weight] = Computed(module.scheme.label, module.scheme.scheme.bits, method, load)
    if problems:
        raise CheckpointError(
            f"{checkpoint.path}: {problems[0]}",
            hint="fetch the checkpoint again; `sparkquant verify` names everything that is wrong with it",
            problems=problems,
        )
    view = replace(
        checkpoint, config=_plain(checkpoint.config), tensors=dict(sorted(tensors.items())), computed=computed
    )
    vars(view)["header_digest"] = checkpoint.header_digest  # which files these are does not depend on how they are seen
    return view


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without any quantization."""
    text = config.get("text_config")
    fields = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text, Mapping):
        fields["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return fields


def _misfits(module: StoredModule) -> Iterator[Problem]:
    """Tensors that the scheme of a module needs and that are not there, or of another kind."""
    assert module.scheme is not None
    codes = module.tensors.get(module.scheme.codes)
    for tensor in module.scheme.outputs(module.shape or (128, 128)):
        header = module.tensors.get(tensor.name)
        if header is None:
            if tensor.name not in ("weight_shape", "input_scale", "input_global_scale"):
                yield Problem(f"{module.name}.{tensor.name}", f"is missing: {module.scheme.label} needs it")
        elif header is codes and header.dtype != tensor.dtype:
            yield Problem(header.name, f"is {header.dtype}, {module.scheme.label} is stored as {tensor.dtype}")
    if codes is not None and module.shape is None:
        yield Problem(codes.name, f"is no matrix, but {list(codes.shape)}")


def _rows(checkpoint: Checkpoint, module: StoredModule, first: int, last: int | None) -> Any:
    from sparkquant.formats import dequantize

    return dequantize(checkpoint, module, first=first, last=last)


def explained(decisions: Mapping[str, Decision], checkpoint: Checkpoint) -> dict[str, Decision]:
    """The decisions with what a quantized source means for them in their reasons."""
    found = dict(decisions)
    for name, computed in checkpoint.computed.items():
        if name in found:
            fate = "written as BF16" if found[name].scheme is None else "quantized again"
            found[name] = replace(found[name], because=f"{found[name].because}; {computed.label} in the source: {fate}")
    return found


def require_permission(decisions: Mapping[str, Decision], checkpoint: Checkpoint, *, allowed: bool) -> None:
    """QuantizedSource when fewer than 8 bits would be made from quantized weights and nobody allowed it."""
    lossy = _again(decisions, checkpoint)
    if not lossy or allowed:
        return
    method, tensor = checkpoint.computed[lossy[0].tensor].method, lossy[0].tensor
    signs = sorted(t for t in _raw_names(checkpoint) if t.startswith(tensor))
    found = f"{len(checkpoint.computed)} quantized weights; for instance {signs[-1] if signs else tensor}"
    raise QuantizedSource(
        f"{checkpoint.path} is quantized already (quant_method {method!r}, {found}),"
        f" and {len(lossy)} of them would be rounded again, to fewer than {FREE_BITS} bits",
        hint=f"{_HINT}; `--allow-requantize` (allow_requantize=True) does it all the same, and records it",
    )


def _raw_names(checkpoint: Checkpoint) -> Iterator[str]:
    return (name for shard in checkpoint.shards.values() for name in shard)


def _again(decisions: Mapping[str, Decision], checkpoint: Checkpoint) -> list[Decision]:
    found = (decisions[name] for name in checkpoint.computed if name in decisions)
    return [d for d in found if d.scheme is not None and d.scheme.bits < FREE_BITS]


def record(decisions: Mapping[str, Decision], checkpoint: Checkpoint) -> dict[str, Any]:
    """What a plan says of a quantized source; empty for another one."""
    if not checkpoint.computed:
        return {}
    schemes = Counter(computed.label for computed in checkpoint.computed.values())
    method = next(iter(checkpoint.computed.values())).method
    fields: dict[str, Any] = {"method": method, "modules": dict(sorted(schemes.items()))}
    if again := _again(decisions, checkpoint):
        fields["allowed_below_8_bits"] = len(again)
    return {"quantized": fields}


def notes(decisions: Mapping[str, Decision], checkpoint: Checkpoint) -> Iterator[str]:
    """What a user of a quantized source has to know."""
    if not checkpoint.computed:
        return
    kept = [name for name in checkpoint.computed if decisions[name].scheme is None]
    if kept:
        listed = ", ".join(kept[:3]) + (f" and {len(kept) - 3} more" if len(kept) > 3 else "")
        yield f"stored quantized in the source and kept by this plan, so written as BF16: {listed}"
    if again := _again(decisions, checkpoint):
        labels = ", ".join(sorted({checkpoint.computed[d.tensor].label for d in again}))
        yield f"rounded twice: {len(again)} tensors go below {FREE_BITS} bits and are {labels} in the source"
    scales = sum(name.endswith(_KV_SCALES) for name in _raw_names(checkpoint))
    if scales:
        yield f"{scales} scales of the source's KV cache are not carried over"
