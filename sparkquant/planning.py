"""The plan: every tensor's fate, decided before a byte is touched. Pure data, byte-stable, made without torch.

    headers -> class -> fusion group -> Decision (with the reason) -> shard map -> totals

The digest of a plan is the identity of the job: resuming and evidence refer to it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkquant.checkpoint import Checkpoint, TensorHeader
from sparkquant.decisions import Decision, OutputShard, Plan
from sparkquant.engine.ranks import Shared, letters_of
from sparkquant.engine.versions import engine_named, require_capability
from sparkquant.errors import CheckpointError, PlanError, Problem, QuantizedSource, UsageError
from sparkquant.footprint import footprint
from sparkquant.layers import ENGINES, MINIMUM_BITS, PROTECTED, LayerClass, Layout, Placement, classify
from sparkquant.layouts import layout_for
from sparkquant.loadable import blocked_by_version, engine_faults, engine_notes, kernel_faults
from sparkquant.quantizers import quantizer_faults
from sparkquant.recipe import Recipe
from sparkquant.recipe_files import load_recipe
from sparkquant.repository_recipe import chosen_recipe
from sparkquant.requantizing import as_16_bit, explained, record, require_permission
from sparkquant.requantizing import notes as requantizing_notes
from sparkquant.routing import plan_loads
from sparkquant.schemes import OutputTensor, Scheme
from sparkquant.sizes import unstated
from sparkquant.source import locate
from sparkquant.structure import structure_faults

if TYPE_CHECKING:
    from sparkquant.source import Model

SHARD_BYTES = 5_000_000_000
"""Default upper size of an output shard in bytes; one tensor larger than this gets a shard of its own."""


def plan(
    model: Model,
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe | None = None,
    *,
    source: str | os.PathLike[str] | None = None,
    method: str | Mapping[str, Any] | None = None,
    tp: Sequence[int] = (),
    shard_bytes: int = SHARD_BYTES,
    engine: str | None = None,
    capability: str | None = None,
    allow_requantize: bool = False,
) -> Plan:
    """The plan that `quantize` would carry out, from headers alone. Arguments and errors are those of `quantize`.

    `engine` is a vLLM version ("vllm==0.33.0", "0.33") that the result must load in; see `make_plan`.
    """
    given = None if recipe is None else load_recipe(recipe)
    found = locate(model, source=source)
    chosen = given or chosen_recipe(found.checkpoint.path)
    chosen = chosen if method is None else chosen.with_method(method)
    return make_plan(
        found.checkpoint,
        chosen,
        tp=tp,
        shard_bytes=shard_bytes,
        overlaid=found.overlay,
        engine=engine,
        capability=capability,
        allow_requantize=allow_requantize,
    )


def make_plan(
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
    tp: Sequence[int] = (),
    shard_bytes: int = SHARD_BYTES,
    overlaid: Iterable[str] = (),
    engine: str | None = None,
    capability: str | None = None,
    allow_requantize: bool = False,
) -> Plan:
    """Decide everything. Raises PlanError with every reason why recipe and checkpoint do not fit, all at once.

    `tp` are tensor-parallel sizes that the result must serve; the recipe's own sizes are reported in `notes` instead.
    `overlaid` names the tensors whose weights come from a live model rather than from the checkpoint's files.
    `engine` is the vLLM version ("0.33", "vllm==0.33.0") that must load the result, and a plan that it cannot load is
    refused. Without it a plan is good when any supported version loads it: `Plan.engines` says which, `notes` why
    others do not; `capability` (that of the recipe's target by default) is then where kernels must take every module.
    A family that none of them has is planned too, with a note: other programs may read the result.
    A source that is quantized is read dequantized; `allow_requantize` lets its weights go below 8 bits.
    """
    _require_numbers(tp, shard_bytes)
    named = None if engine is None else engine_named(engine)
    if capability is not None:
        require_capability(capability)
    layout = layout_for(checkpoint.config, source=str(checkpoint.path / "config.json"))
    checkpoint = as_16_bit(checkpoint)
    if checkpoint.computed and any(True for _ in overlaid):
        raise QuantizedSource(
            f"{checkpoint.path} is quantized already, and a live model cannot be laid over it",
            hint="pass the folder instead of the model",
        )
    placements = classify(layout, checkpoint.tensors, source=str(checkpoint.path))
    problems = list(_misfits(checkpoint, recipe, layout, placements))
    problems += structure_faults(checkpoint, layout, placements)
    decisions: dict[str, Decision] = {}
    for name, header in checkpoint.tensors.items():
        decision = _decide(header, placements[name], recipe, layout)
        if isinstance(decision, Problem):
            problems.append(decision)
        else:
            decisions[name] = decision
    decisions = explained(decisions, checkpoint)
    require_permission(decisions, checkpoint, allowed=allow_requantize)
    problems += _mixed_groups(decisions.values())
    blocked = blocked_by_version(decisions.values(), placements)
    problems += engine_faults(layout, blocked, None if named is None else named.rules)
    problems += quantizer_faults(decisions.values(), layout.family, recipe.method)
    for size in tp:
        faults = _rank_faults(decisions.values(), placements, layout, size)
        problems += [replace(fault, what=f"tensor parallel {size}: {fault.what}") for fault in faults]
    _require_none(problems, recipe, checkpoint)
    notes = (*_notes(checkpoint, recipe, layout, placements, decisions), *engine_notes(layout, blocked))
    notes = (*requantizing_notes(decisions, checkpoint), *notes)
    shards = _shard_map(checkpoint, decisions, shard_bytes)
    made = Plan(
        source={
            "model_type": checkpoint.config.get("model_type"),
            "architectures": checkpoint.config.get("architectures"),
            "headers": checkpoint.header_digest,
            **({"overlaid": names} if (names := sorted(overlaid)) else {}),
            **record(decisions, checkpoint),
        },
        recipe=recipe,
        layout=layout,
        decisions=decisions,
        shards=shards,
        footprint=footprint(decisions.values(), layout, recipe),
        notes=notes,
        engines=tuple(version for version in layout.engines if not blocked[version]),
    )
    if named is not None or capability is not None:
        named = named or engine_named(made.engines[-1] if made.engines else ENGINES[-1])
        loads = plan_loads(made, named.rules)
        faults = kernel_faults(loads, named, tp, capability or recipe.target.capability)
        _require_none(list(faults), recipe, checkpoint)
    return made


def _require_none(problems: Sequence[Problem], recipe: Recipe, checkpoint: Checkpoint) -> None:
    if problems:
        raise PlanError(
            f"recipe {recipe.name!r} cannot be applied to {checkpoint.path}",
            hint="`sparkquant recipes ls` lists recipes by family; `plan --explain TENSOR` shows one decision",
            problems=problems,
        )


def _require_numbers(tp: Any, shard_bytes: Any) -> None:
    if isinstance(tp, str) or not isinstance(tp, Sequence) or not all(type(size) is int for size in tp):
        raise UsageError(f"tensor-parallel sizes are a list of integers, not {tp!r}", hint="pass sizes like tp=(1, 2)")
    if wrong := [size for size in tp if size < 1]:
        raise UsageError(f"tensor-parallel size {wrong[0]} is not positive", hint="pass sizes like 1,2")
    if type(shard_bytes) is not int:
        raise UsageError(f"shard_bytes is {shard_bytes!r}, not a number of bytes", hint="pass 5_000_000_000")


def _misfits(
    checkpoint: Checkpoint, recipe: Recipe, layout: Layout, placements: Mapping[str, Placement]
) -> Iterator[Problem]:
    """Faults that concern the recipe as a whole."""
    if layout.family not in recipe.families:
        yield Problem(recipe.name, f"is for {', '.join(recipe.families)}; this checkpoint is {layout.family}")
    halves = [t.name for t in checkpoint.tensors.values() if t.dtype == "F16" and len(t.shape) > 1]
    if checkpoint.float16 or halves:
        what = "config.json asks for float16" if checkpoint.float16 else f"{len(halves)} weights are float16"
        hint = "convert the checkpoint to bfloat16: activations of these families overflow float16 to NaN or `!!!!`"
        yield Problem("config.json" if checkpoint.float16 else halves[0], what, hint)
    declared = checkpoint.text_config.get("num_hidden_layers")
    decoder = (p for p in placements.values() if p.layer_class not in _OUTSIDE_THE_DECODER)
    found = sorted({p.layer for p in decoder if p.layer is not None})
    if type(declared) is int and found and (len(found) != declared or found[-1] != declared - 1):
        what = f"declares {declared} layers, yet tensors exist for layers {_ranges(found)}"
        yield Problem("config.json", what, "fetch the checkpoint again: a part of it is missing")
    if layout.tied_head and recipe.schemes.get(LayerClass.LM_HEAD) is not None:
        yield Problem("lm_head", "is tied to the embedding and cannot have a scheme", "write `lm_head: keep`")
    layers = {(p.layer_class, p.layer) for p in placements.values() if p.rule.linear}
    for override in recipe.overrides:
        for layer in override.layers:
            if (override.layer_class, layer) not in layers:
                have = sorted(index for c, index in layers if c is override.layer_class and index is not None)
                span = f"layers with it: {_ranges(have)}" if have else "this checkpoint has no such class"
                yield Problem(recipe.name, f"override of {override.layer_class} in layer {layer} hits nothing", span)


_OUTSIDE_THE_DECODER = (LayerClass.MTP, LayerClass.VISION, LayerClass.AUDIO)


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _choose(placement: Placement, recipe: Recipe) -> tuple[Scheme | None, str]:
    """Scheme and reason for one tensor."""
    layer_class = placement.layer_class
    if layer_class in recipe.unprotect and placement.rule.linear:
        permission = recipe.unprotect[layer_class]
        return permission.scheme, f"unprotected: {permission.why}"
    if layer_class in PROTECTED:
        return None, f"protected: {PROTECTED[layer_class]}"
    if not placement.rule.linear:
        return None, "not a matrix of a Linear"
    for override in recipe.overrides:
        if override.layer_class is layer_class and placement.layer in override.layers:
            return override.scheme, f"override: {override.why}"
    if layer_class not in recipe.schemes:
        return None, f"the recipe names no scheme for {layer_class}"
    scheme = recipe.schemes[layer_class]
    return scheme, f"recipe: {layer_class}: {scheme.label if scheme else 'keep'}"


def _decide(header: TensorHeader, placement: Placement, recipe: Recipe, layout: Layout) -> Decision | Problem:
    scheme, because = _choose(placement, recipe)
    if placement.layer_class is LayerClass.LM_HEAD and scheme is not None:
        if layout.tied_head:
            scheme, because = None, "tied to the embedding"
        elif reason := layout.never_quantized.get(LayerClass.LM_HEAD):
            scheme, because = None, reason
    least, why = MINIMUM_BITS.get(placement.layer_class, (0, ""))
    if placement.layer_class in PROTECTED:  # a recipe cannot say so, yet objects can be put together by hand
        least, why = 8, PROTECTED[placement.layer_class]
    if scheme is not None and scheme.bits < least:
        hint = f"`{placement.layer_class}: fp8`, w8a16 or keep"
        return Problem(header.name, f"{placement.layer_class} never goes below {least} bits: {why}", hint)
    rule = placement.rule
    parts = rule.parts if scheme is not None else ()
    outputs: tuple[OutputTensor, ...] = (OutputTensor(header.name, header.dtype, header.shape),)
    experts = 1
    if scheme is not None:
        if header.dtype not in ("BF16", "F32", "F16"):
            return Problem(header.name, f"has dtype {header.dtype}: only BF16 and F32 weights are quantized")
        shape, experts, fault = _module_shape(header, parts)
        fault = fault or scheme.problem(shape)
        if fault:
            return Problem(header.name, fault, _shape_hint(scheme, placement.layer_class))
        outputs = tuple(
            OutputTensor(f"{module}.{t.name}", t.dtype, t.shape)
            for module in (_expert_modules(placement.module, parts) if parts else (placement.module,))
            for t in scheme.outputs(shape)
        )
    return Decision(
        tensor=header.name, shard=header.shard, dtype=header.dtype, shape=header.shape,
        layer_class=placement.layer_class, layer=placement.layer, module=placement.module, group=placement.group,
        scale_group=placement.scale_group, parts=parts, scheme=scheme, because=because, outputs=outputs,
        experts=experts,
    )  # fmt: skip


def _shape_hint(scheme: Scheme, layer_class: LayerClass) -> str:
    if scheme.is_integer:
        return f"`{layer_class}: {{scheme: {scheme.name}, group_size: 32}}`, nvfp4a16 (groups of 16), fp8 or keep"
    return f"`{layer_class}: fp8` or keep"


def _expert_modules(module: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    parent = module.rpartition(".")[0]
    return tuple(f"{parent}.{{expert}}.{part}" for part in parts)


def _module_shape(header: TensorHeader, parts: tuple[str, ...]) -> tuple[tuple[int, ...], int, str | None]:
    """Shape of one Linear inside a tensor, how many experts it holds, and a fault."""
    if not parts:
        return header.shape, 1, None
    if len(header.shape) != 3:
        return header.shape, 1, f"a fused expert tensor has three dimensions, this one is {list(header.shape)}"
    experts, rows, columns = header.shape
    if rows % len(parts):
        return header.shape, 1, f"{rows} rows do not split into {' and '.join(parts)}"
    return (rows // len(parts), columns), experts, None


def _mixed_groups(decisions: Iterable[Decision]) -> Iterator[Problem]:
    """The engine resolves one scheme for a fused module and silently applies it to every part."""
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for decision in decisions:
        if decision.group:
            groups[decision.group].setdefault(decision.scheme.label if decision.scheme else "keep", decision.tensor)
    for group, schemes in groups.items():
        if len(schemes) > 1:
            listed = ", ".join(
                f"{tensor.rpartition('.weight')[0] or tensor}: {label}" for label, tensor in schemes.items()
            )
            yield Problem(
                group, f"one engine module with several schemes ({listed})", "give its classes the same scheme"
            )


def _rank_faults(
    decisions: Iterable[Decision], placements: Mapping[str, Placement], layout: Layout, tp: int
) -> Iterator[Problem]:
    """Why the engine cannot split the model, or a quantized module, over so many ranks."""
    shared = Shared(layout.sizes, letters_of(placement.rule for placement in placements.values()))
    if whole := "; ".join(shared.faults(tp)):
        yield Problem("config.json", whole, shared.fitting)
        return
    for d in decisions:
        if d.scheme is None:
            continue
        shape = (d.shape[-2] // max(1, len(d.parts)), d.shape[-1])
        rule = placements[d.tensor].rule
        fault = d.scheme.problem(shape, tp=tp, row_parallel=rule.row_parallel)
        if fault is None and rule.groups % tp:
            fault = f"its rows hold {rule.groups} groups, and the engine shards the scales of whole groups alone"
        if fault:
            hint = f"`{d.layer_class}: keep`, or another tensor-parallel size"
            yield Problem(d.tensor, fault, hint)


def _notes(
    checkpoint: Checkpoint,
    recipe: Recipe,
    layout: Layout,
    placements: Mapping[str, Placement],
    decisions: Mapping[str, Decision],
) -> Iterator[str]:
    if checkpoint.config.get("architectures") is None:
        yield "config.json names no architectures: engines choose the model's class by it and will not load the result"
    if gap := unstated(checkpoint.config):
        yield f"config.json {gap}"
    present = {p.layer_class for p in placements.values()}
    absent = sorted(str(c) for c in (*recipe.schemes, *recipe.unprotect) if c not in present and c in layout.classes)
    if absent:
        yield f"this checkpoint has no {', '.join(absent)}: those lines of the recipe do nothing here"
    if layout.mtp.declared and LayerClass.MTP not in present:
        tensor = "layer behind the last one" if layout.mtp.by_index else "mtp.* tensor"
        yield (
            f"config.json declares a draft head ({layout.mtp.config_key}), but the checkpoint has no {tensor}:"
            " it was lost before; speculative decoding with MTP will not work"
        )
    key = layout.mtp.config_key
    undeclared = LayerClass.MTP in present and not layout.mtp.declared
    if undeclared and (layout.mtp.by_index or key in checkpoint.text_config):
        yield f"a draft head is stored, yet config.json says that there is none ({key}): engines stop or leave it out"
    sees = isinstance(checkpoint.config.get("vision_config"), Mapping)
    if sees and not {LayerClass.VISION, LayerClass.AUDIO} & present:
        yield "config.json declares a vision tower, but the checkpoint has none: the result cannot read images"
    head = recipe.schemes.get(LayerClass.LM_HEAD) is not None and not layout.tied_head
    if head and (reason := layout.never_quantized.get(LayerClass.LM_HEAD)):
        yield f"lm_head stays 16-bit: {reason}"
    for size in recipe.target.tensor_parallel:
        if size > 1 and (faults := list(_rank_faults(decisions.values(), placements, layout, size))):
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            yield f"not servable with tensor parallel {size}: {faults[0].where}: {faults[0].what}{more}"
    if checkpoint.tensors and layout.tied_head and "lm_head.weight" in checkpoint.tensors:
        yield "config.json ties lm_head to the embedding, yet an lm_head.weight is stored: it is copied as it is"


def _shard_map(checkpoint: Checkpoint, decisions: Mapping[str, Decision], limit: int) -> tuple[OutputShard, ...]:
    """Cut the result into files in source order; parts of one fusion group stay in one file."""
    if limit < 1:
        raise UsageError(f"shard size {limit} is not positive", hint="pass a size like 5GB")
    units: dict[str, list[str]] = {}
    for name, d in sorted(decisions.items(), key=lambda kv: (kv[1].shard, checkpoint.tensors[kv[0]].start)):
        units.setdefault(d.scale_group if d.scheme else name, []).append(name)
    shards: list[list[str]] = []
    sizes: list[int] = []
    for names in units.values():
        size = sum(decisions[name].output_bytes for name in names)
        if not shards or sizes[-1] + size > limit:
            shards.append([])
            sizes.append(0)
        shards[-1] += names
        sizes[-1] += size
    if not shards:
        raise CheckpointError(f"{checkpoint.path} holds no tensors", hint="is this the right folder?")
    count = len(shards)
    return tuple(
        OutputShard(
            "model.safetensors" if count == 1 else f"model-{index:05d}-of-{count:05d}.safetensors", tuple(names), size
        )
        for index, (names, size) in enumerate(zip(shards, sizes, strict=True), 1)
    )
