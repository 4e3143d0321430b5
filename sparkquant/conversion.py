"""`sparkquant.convert`: a finished checkpoint of any producer, re-emitted as compressed-tensors and repaired.

    modules -> restated without rounding -> what is missing grafted -> proven equal -> verified -> rename

Every change is said. What would change a number is refused: codes are moved and never made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparkquant import formats, version
from sparkquant.checkpoint import Checkpoint, TensorHeader
from sparkquant.conversion_repairs import (
    Repairs,
    graft,
    refuse_protected,
    renamed_modules,
    restored_dtypes,
    restored_files,
    without_coarse_draft,
)  # fmt: skip
from sparkquant.decisions import Decision
from sparkquant.errors import CheckFailed, CheckpointError, Problem, UsageError
from sparkquant.events import Advanced, Finished, Listener, Started, ignore
from sparkquant.evidence import FOLDER, checkpoint_digest, document_of
from sparkquant.formats.stored import StoredModule
from sparkquant.hfconfig import quantization_config
from sparkquant.layers import Layout, classify
from sparkquant.layouts import layout_for
from sparkquant.planning import SHARD_BYTES
from sparkquant.provenance import origin_of
from sparkquant.reading import ShardReader, raw_bytes
from sparkquant.report import Report
from sparkquant.requantizing import OLD_CONFIGS
from sparkquant.restatement import Restated, dtype_name, group_arguments, restate
from sparkquant.schemes import OutputTensor, Scheme
from sparkquant.shard_writer import ShardWriter
from sparkquant.source import as_path, locate
from sparkquant.verification.gate import verify
from sparkquant.writer import StagedCheckpoint

RECIPROCAL_ERROR = 2.0**-22
"""Relative: a float32 reciprocal taken twice may be off by one unit in its last place."""


@dataclass(frozen=True)
class Converted:
    """What `convert` made: the folder, everything that it changed, in words, and the checks that it passed."""

    out: Path
    changes: tuple[str, ...]
    report: Report

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"out": str(self.out), "changes": list(self.changes), "checks": self.report.as_json()}


@dataclass(frozen=True)
class _Piece:
    """Tensors that are written together, and how."""

    outputs: tuple[OutputTensor, ...]
    write: Callable[[ShardWriter], None]


@dataclass(frozen=True)
class _Declared:
    """Decisions of a finished checkpoint, as `hfconfig` asks for them."""

    decisions: Mapping[str, Decision]
    layout: Layout


def convert(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    source: str | os.PathLike[str] | None = None,
    restart: bool = False,
    listener: Listener = ignore,
) -> Converted:
    """Re-emit the finished checkpoint `model` into the new folder `out`, repaired where that changes no number.

    source   the 16-bit checkpoint that it was made from: what was lost (draft head, vision tower, side files) or cast
             is taken from there
    restart  discard what an interrupted run of another job left in `out`.partial

    A killed run goes on when it is called again. Raises CheckpointError with everything that cannot be said in
    compressed-tensors without rounding, and CheckFailed when the repaired folder still fails a check of `verify`: then
    nothing appears.
    """
    target = as_path(out)
    checkpoint = Checkpoint.open(locate_folder(model), strict=False)
    original = None if source is None else locate(source).checkpoint
    if original is not None and formats.quantization_of(original) is not None:
        raise UsageError(f"{original.path} is quantized itself", hint="pass the 16-bit checkpoint as --source")
    modules = _modules(checkpoint)
    layout = layout_for((original or checkpoint).config, source=str(checkpoint.path / "config.json"))
    repairs = Repairs(checkpoint, original, layout)
    names = renamed_modules(repairs, modules)
    modules = without_coarse_draft(repairs, modules)
    refuse_protected(repairs, modules)
    _tell_index(repairs)
    with ShardReader(checkpoint) as reader, repairs:
        restated = _restated(modules, reader)
        pieces = _pieces(repairs, modules, names, restated, reader)
        block = _block(repairs, names, restated, pieces)
        with StagedCheckpoint(target, _job(checkpoint, original), restart=restart) as staged:
            _write(staged, pieces, listener)
            _write_files(staged, repairs, block)
            _require_equal(repairs, staged.path, modules, names, restated)
            staged.write_text("sparkquant/conversion.json", _record(repairs))
            report = verify(staged.path, source=None if original is None else original.path, listener=listener)
            _require_green(report, repairs)
            _write_evidence(staged, repairs, report)
            staged.publish()
    return Converted(target, tuple(repairs.changes), Report(str(target), report.checks))


def locate_folder(model: str | os.PathLike[str]) -> Path:
    """The folder of a finished checkpoint; what is wrong with its index is what may be repaired."""
    from sparkquant.source import local_path

    path = local_path(model)
    return path if path.is_dir() else locate(model).checkpoint.path


def _modules(checkpoint: Checkpoint) -> dict[str, StoredModule]:
    """Every stored module with its scheme; CheckpointError for what is not quantized, or not understood."""
    said = formats.declared(checkpoint)
    if said is None:
        raise CheckpointError(
            f"{checkpoint.path} is no quantized checkpoint: there is nothing to convert",
            hint="`sparkquant quantize` makes one of it",
        )
    problems = [Problem(fault.where, fault.what) for fault in said.faults if fault.where != "format"]
    problems += [p for p in checkpoint.inconsistencies if p.what.startswith("stored twice")]
    modules = dict(formats.stored_modules(checkpoint))
    problems += [
        Problem(name, "is stored quantized, and the config gives it no scheme")
        for name, module in modules.items()
        if module.is_quantized and module.scheme is None and not name.endswith((".k_scale", ".v_scale"))
    ]
    if said.kv_cache:
        what = "declares a quantized KV cache, which these engines do not load; without it numbers would change"
        problems.append(Problem("quantization_config", what, "remove it yourself if you do not want it"))
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} cannot be converted",
            hint="`sparkquant verify` says more of what is wrong",
            problems=problems,
        )
    return modules


def _tell_index(repairs: Repairs) -> None:
    faults = repairs.checkpoint.inconsistencies
    if faults:
        repairs.say(f"index rebuilt: {len(faults)} places where it and the shards disagreed, for instance {faults[0]}")


def _restated(modules: Mapping[str, StoredModule], reader: ShardReader) -> dict[str, Restated]:
    found = {name: restate(module, reader) for name, module in modules.items() if module.scheme is not None}
    problems = [value for value in found.values() if isinstance(value, Problem)]
    if problems:
        raise CheckpointError(
            f"{len(problems)} modules cannot be said in compressed-tensors without changing numbers",
            hint="quantize the 16-bit source again",
            problems=problems,
        )
    return {name: value for name, value in found.items() if isinstance(value, Restated)}


def _pieces(
    repairs: Repairs,
    modules: Mapping[str, StoredModule],
    names: Mapping[str, str],
    restated: Mapping[str, Restated],
    reader: ShardReader,
) -> list[_Piece]:
    """Everything that the result stores: kept tensors first as they are, or as the source has them."""
    restored = restored_dtypes(repairs, modules, names, reader)
    pieces = []
    for name, module in modules.items():
        if name in restated:
            pieces.append(_quantized_piece(names[name], restated[name], reader))
            continue
        for suffix, header in module.tensors.items():
            stored = f"{names[name]}.{suffix}" if suffix else names[name]
            pieces.append(_kept_piece(stored, restored.get(stored), header, reader, repairs))
    present = {output.name for piece in pieces for output in piece.outputs}
    for header in graft(repairs, present, set(map(names.get, restated))):
        pieces.append(_kept_piece(header.name, header, header, reader, repairs))
    return pieces


def _kept_piece(
    name: str, of_source: TensorHeader | None, header: TensorHeader, reader: ShardReader, repairs: Repairs
) -> _Piece:
    taken, files = (header, reader) if of_source is None else (of_source, repairs.source_reader)

    def write(writer: ShardWriter) -> None:
        writer.copy(name, taken.dtype, taken.shape, files.file(taken.shard), taken.start, taken.bytes)

    return _Piece((OutputTensor(name, taken.dtype, taken.shape),), write)


def _quantized_piece(name: str, restated: Restated, reader: ShardReader) -> _Piece:
    outputs = tuple(OutputTensor(f"{name}.{o.name}", o.dtype, o.shape) for o in restated.outputs)
    shapes = {o.name: o.shape for o in outputs}

    def write(writer: ShardWriter) -> None:
        for suffix, header in restated.copied.items():
            stored = f"{name}.{suffix}"
            file = reader.file(header.shard)
            writer.copy(stored, header.dtype, shapes[stored], file, header.start, header.bytes)
        for suffix, tensor in restated.made(reader).items():
            writer.put(f"{name}.{suffix}", dtype_name(tensor), tuple(tensor.shape), raw_bytes(tensor))

    return _Piece(outputs, write)


def _block(
    repairs: Repairs, names: Mapping[str, str], restated: Mapping[str, Restated], pieces: Sequence[_Piece]
) -> dict[str, Any]:
    """The quantization config of the result, by the same rules as that of `quantize`."""
    schemes = {names[name]: module.scheme for name, module in restated.items()}
    labels = {module: _labelled(stored) for module, stored in schemes.items()}
    kept = {o.name for piece in pieces for o in piece.outputs} - {
        f"{names[name]}.{o.name}" for name, module in restated.items() for o in module.outputs
    }
    weights = {f"{module}.weight": label for module, label in labels.items()}
    placements = classify(repairs.layout, [*weights, *sorted(kept)], source=str(repairs.checkpoint.path))
    decisions = {
        name: Decision(
            tensor=name,
            shard="",
            dtype="BF16",
            shape=(),
            layer_class=p.layer_class,
            layer=p.layer,
            module=p.module,
            group=p.group,
            scale_group=p.scale_group,
            parts=(),
            scheme=weights.get(name),
            because="",
            outputs=(),
        )
        for name, p in placements.items()
    }
    block = quantization_config(_Declared(decisions, repairs.layout))
    assert block is not None
    by_label = {labels[module].label: stored for module, stored in schemes.items()}
    for label, group in zip(sorted(by_label), block["config_groups"].values(), strict=True):
        group["weights"], group["input_activations"] = group_arguments(by_label[label])
    old = formats.quantization_of(repairs.checkpoint)
    method = old.get("quant_method")
    if method != "compressed-tensors":
        repairs.say(f"{method} said as compressed-tensors: {len(restated)} modules, {', '.join(sorted(by_label))}")
    elif sorted(old.get("ignore") or ()) != sorted(block["ignore"]):
        repairs.say(f"ignore list and targets written anew: {len(block['ignore'])} entries, every kept class listed")
    return block


def _labelled(stored: Any) -> Scheme:
    """A scheme whose label tells relatives apart: FP8 by tensor from FP8 by row, static inputs from none."""
    if stored.scheme.is_integer:
        scheme: Scheme = stored.scheme
        return scheme
    extra = (" tensor" if stored.per_tensor else "") + ("" if stored.inputs == "none" else f" {stored.inputs}")
    return Scheme(f"{stored.scheme.name}{extra}", stored.scheme.bits, 0, True, stored.scheme.format)


def _job(checkpoint: Checkpoint, original: Checkpoint | None) -> dict[str, Any]:
    of_source = {} if original is None else {"source": original.header_digest}
    return {
        "convert": checkpoint.header_digest,
        "files": checkpoint.fingerprint(),
        "sparkquant": version(),
        **of_source,
    }


def _write(staged: StagedCheckpoint, pieces: Sequence[_Piece], listener: Listener) -> None:
    shards: list[list[_Piece]] = [[]]
    size = 0
    for piece in pieces:
        more = sum(o.bytes for o in piece.outputs)
        if shards[-1] and size + more > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += more
    count = len(shards)
    named = {
        "model.safetensors" if count == 1 else f"model-{index:05d}-of-{count:05d}.safetensors": found
        for index, found in enumerate(shards, 1)
    }
    stored = {name: [o for piece in found for o in piece.outputs] for name, found in named.items()}
    todo = {name: found for name, found in named.items() if name not in staged.finished}
    total = sum(o.bytes for name in todo for o in stored[name])
    staged.require_space(total)
    listener(Started("convert", total))
    for name, found in todo.items():
        with staged.shard(name, stored[name]) as writer:
            for piece in found:
                piece.write(writer)
                listener(Advanced("convert", sum(o.bytes for o in piece.outputs), piece.outputs[0].name))
    listener(Finished("convert"))
    staged.write_index(stored)


def _write_files(staged: StagedCheckpoint, repairs: Repairs, block: Mapping[str, Any]) -> None:
    """Side files, and config.json last."""
    for name, path in restored_files(repairs, OLD_CONFIGS).items():
        staged.copy_file(name, path)
    config = {**repairs.config(), "quantization_config": block}
    staged.write_text("config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _record(repairs: Repairs) -> str:
    """Who made the checkpoint, and everything that was changed."""
    producer = str(formats.quantization_of(repairs.checkpoint).get("quant_method"))
    return json.dumps({"producer": producer, "changes": repairs.changes}, indent=1, ensure_ascii=False) + "\n"


def _write_evidence(staged: StagedCheckpoint, repairs: Repairs, report: Report) -> None:
    """Evidence of the conversion and of the checks; the shards' digests are those of the journal."""
    digest = checkpoint_digest(staged.path, known=staged.digests)
    made_of = origin_of(repairs.checkpoint.path)
    beside = {} if repairs.original is None else {"original": origin_of(repairs.original.path)["source"]}
    results: dict[str, dict[str, Any]] = {
        "convert": {"changes": repairs.changes},
        "verify": {"ok": report.ok, "checks": report.as_json()},
    }
    for verb, result in results.items():
        text = document_of(staged.path, verb, result, digest, inputs={**made_of, **beside, "level": "default"})
        staged.write_text(f"{FOLDER}/{verb}.json", text)


def _require_equal(
    repairs: Repairs,
    folder: Path,
    modules: Mapping[str, StoredModule],
    names: Mapping[str, str],
    restated: Mapping[str, Restated],
) -> None:
    """Read both back: every restated module stands for the same float32 weights."""
    made = Checkpoint.open(folder)
    after = formats.stored_modules(made)
    off, problems = 0, []
    for name, module in restated.items():
        if not set(module.outputs) - {OutputTensor(s, h.dtype, h.shape) for s, h in module.copied.items()}:
            continue  # the same bytes
        old = formats.dequantize(repairs.checkpoint, modules[name])
        new = formats.dequantize(made, after[names[name]])
        if not torch.equal(old, new):
            error = float(((new - old).abs() / old.abs().clamp(min=torch.finfo(torch.float32).tiny)).max())
            off += error <= RECIPROCAL_ERROR
            if error > RECIPROCAL_ERROR:
                problems.append(Problem(name, f"would be off by {error:.1e} of the weight"))
    if problems:
        raise CheckpointError("numbers would change", hint="report this checkpoint's producer", problems=problems)
    if off:
        repairs.say(f"global scales inverted: weights of {off} modules differ in the last bit of float32, below 2.4e-7")


def _require_green(report: Report, repairs: Repairs) -> None:
    """What still fails cannot be repaired without changing numbers; tensors that the producer changed are known."""
    failed = [c for c in report.failed if not (c.id == "source.bytes" and set(c.tensors) <= repairs.changed)]
    if failed:
        raise CheckFailed(
            f"{repairs.checkpoint.path} cannot be repaired without changing numbers: {len(failed)} checks fail",
            hint="quantize the 16-bit source again"
            if repairs.original is not None
            else "pass --source: what is missing can be taken from there",
            problems=[Problem(check.id, check.message) for check in failed],
        )
