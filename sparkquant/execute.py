"""The loop of `quantize`: plan -> shards -> checks -> rename. What a shard holds is made by `sparkquant.filling`."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sparkquant import version
from sparkquant.backend_choice import Records, chosen_backend, require_method
from sparkquant.backend_job import BackendJob, work_key
from sparkquant.checkpoint import Checkpoint, read_json
from sparkquant.decisions import Plan, source_bytes
from sparkquant.errors import CheckFailed, CheckpointError, Problem, UsageError
from sparkquant.events import Finished, Listener, Said, Started, ignore
from sparkquant.filling import fill_shard
from sparkquant.hfconfig import result_config
from sparkquant.planning import SHARD_BYTES, make_plan
from sparkquant.provenance import kept_name, write_provenance
from sparkquant.recipe import Recipe
from sparkquant.recipe_files import load_recipe, recipe_from_text
from sparkquant.report import Report
from sparkquant.repository_recipe import calibration_of, chosen_recipe, kept_at_home
from sparkquant.requantizing import OLD_CONFIGS, as_16_bit
from sparkquant.schemes import OutputTensor
from sparkquant.source import Source, as_path, locate
from sparkquant.verification.folder import JSON_FILES
from sparkquant.verification.gate import verify
from sparkquant.verification.identity import is_required
from sparkquant.writer import StagedCheckpoint

if TYPE_CHECKING:
    from sparkquant.calibration.calibration_set import CalibrationSet
    from sparkquant.source import Model


@dataclass(frozen=True)
class Quantized:
    """What `quantize` made: the folder, its plan, and the report of the checks that it passed."""

    out: Path
    plan: Plan
    report: Report


def quantize(
    model: Model,
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
    source: str | os.PathLike[str] | None = None,
    method: str | Mapping[str, Any] | None = None,
    tp: Sequence[int] = (),
    shard_bytes: int = SHARD_BYTES,
    restart: bool = False,
    calibration: str | os.PathLike[str] | None = None,
    rows: int | None = None,
    allow: Sequence[str] = (),
    allow_requantize: bool = False,
    engine: str | None = None,
    device: str = "auto",
    max_memory: int | None = None,
    listener: Listener = ignore,
) -> Quantized:
    """Quantize `model` by `recipe` into the new folder `out`, verify it, and return what was made.

    model    a checkpoint folder, a hub id, or a live torch module (then `source` may name its checkpoint folder)
    recipe   a shipped name, a YAML file, plain data or a Recipe; without one the sparkquant.yaml or recipe.yaml that
             the model's repository holds, or else qwen-hybrid-w4a16
    method   a name, or a map with options, instead of the recipe's own
    tp       tensor-parallel sizes that the result must serve
    restart  discard what an interrupted run of another job left in `out`.partial
    calibration, allow   for calibrated methods: a mix, conversations or rows of ids instead of the recipe's mix, and
             the refusals to lift (see `sparkquant.calibration.load_calibration`)
    rows     at most so many calibration rows, instead of the recipe's number
    allow_requantize   let weights that are quantized in the source go below 8 bits (they are read dequantized)
    engine   the vLLM version ("vllm==0.33.0", "0.33") that must load the result; otherwise any that is known may
    device   where blocks of a calibrated method run (auto takes CUDA where there is one)
    max_memory   what calibration may use, in bytes

    Nothing named `out` exists until everything is written and verified. A killed run goes on when it is called again.
    Raises the errors of `sparkquant.errors`; all faults of recipe, checkpoint and shapes come before any work.
    """
    target = as_path(out)
    given = None if recipe is None else load_recipe(recipe)
    found = locate(model, source=source)
    chosen = given or chosen_recipe(found.checkpoint.path, listener)
    chosen = chosen if method is None else chosen.with_method(method)
    _require_apart(found.checkpoint.path, target)
    plan = make_plan(
        found.checkpoint,
        chosen,
        tp=tp,
        shard_bytes=shard_bytes,
        overlaid=found.overlay,
        engine=engine,
        allow_requantize=allow_requantize,
    )
    require_method(plan, device=device, max_memory=max_memory)
    found = Source(as_16_bit(found.checkpoint), found.overlay)
    for note in plan.notes:
        listener(Said(note))
    if not chosen.method.calibrated and (calibration is not None or rows is not None):
        raise UsageError(f"method {chosen.method.name} takes no calibration", hint="pass method gptq or imatrix")
    options = _Options(restart, device, max_memory, kept_at_home(found.checkpoint.path, calibration), listener)
    if not chosen.method.calibrated:
        return _run(plan, found, target, options, None)
    from sparkquant.calibration.loading import load_calibration  # pays for building its models

    seen = load_calibration(
        calibration or calibration_of(chosen, found.checkpoint.path),
        found.checkpoint,
        rows=rows if rows is not None or calibration else chosen.calibration.rows,
        tokens=chosen.calibration.tokens,
        allow=allow,
    )
    return _run(plan, found, target, options, seen)


def _require_apart(source: Path, target: Path) -> None:
    """The staging folder is cleared, and side files are copied: neither may touch the source."""
    folder = source.resolve()
    if folder in target.resolve().parents:
        raise UsageError(f"{target} lies inside the source", hint="choose a folder beside it")
    staging = target.with_name(f"{target.name}.partial").resolve()
    if staging == folder or staging in folder.parents:
        raise UsageError(f"the source lies in {staging}, the work folder of this output", hint="choose another output")


@dataclass(frozen=True)
class _Options:
    restart: bool
    device: str
    max_memory: int | None
    stays: Collection[Path]
    """Files of the source that the result does not take over."""
    listener: Listener


def _run(plan: Plan, source: Source, target: Path, options: _Options, calibration: CalibrationSet | None) -> Quantized:
    listener, began = options.listener, time.time_ns()
    carried = _carried(source.checkpoint, options.stays)
    side_files = {kept_name(name): _inside(source.checkpoint.path, name) for name in carried}
    job = _job(plan, source, calibration)
    with StagedCheckpoint(target, job, restart=options.restart) as staged, ExitStack() as stack:
        _forget(staged.discarded)
        stored = {shard.name: _stored(plan, shard.tensors) for shard in plan.shards}
        todo = [shard for shard in plan.shards if shard.name not in staged.finished]
        if staged.finished:
            listener(Said(f"resuming: {len(staged.finished)} of {len(plan.shards)} shards are done already"))
        beside = sum(path.stat().st_size for path in side_files.values())
        staged.require_space(sum(shard.bytes for shard in todo) + beside)
        asked = BackendJob(plan, source, calibration, job, target, options.device, options.max_memory, listener)
        backend, records = stack.enter_context(chosen_backend(asked))
        names = [name for shard in todo for name in shard.tensors]
        listener(Started("quantize", sum(source_bytes(plan.decisions[name]) for name in names)))
        for shard in todo:
            with staged.shard(shard.name, stored[shard.name]) as writer:
                fill_shard(plan, shard.tensors, source, backend, writer, listener)
        listener(Finished("quantize"))
        staged.write_index(stored)
        _write_side_files(staged, plan, source.checkpoint, side_files, records)
        report = _verified(staged.path, source.checkpoint.path, began, listener)
        if not report.ok:
            raise CheckFailed(
                f"the staged result failed {len(report.failed)} checks and was not published",
                hint=f"this is a bug: report it with {staged.path / 'sparkquant' / 'plan.json'}",
                problems=[Problem(check.id, check.message) for check in report.failed],
            )
        write_provenance(staged, plan, source.checkpoint.path, report, records)
        stack.close()  # the private work folder goes before the result appears
        staged.publish()
    return Quantized(target, plan, Report(str(target), report.checks))


def _verified(staged: Path, source: Path, began: int, listener: Listener) -> Report:
    """Check the staged result against the source. Whatever is wrong, a source that changed meanwhile is named first."""
    try:
        report = verify(staged, source=source, listener=listener)
    except CheckpointError:
        _require_rest(source, began)
        raise
    if not report.ok:
        _require_rest(source, began)
    return report


def _require_rest(folder: Path, began: int) -> None:
    """Blame the source when one of its files was written after we began: `began` in ns since the epoch."""
    changed = [path.name for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_mtime_ns > began]
    if changed:
        raise CheckpointError(
            f"{folder} changed while it was read: {', '.join(changed[:5])}",
            hint="let whatever writes there end, then run the same command with --restart",
        )


def _forget(job: Any) -> None:
    """Remove the private work folder of a job that `restart` discards."""
    if isinstance(job, dict) and "calibration" in job:
        from sparkquant.calibration.private_folder import private_folder

        with private_folder(work_key(job)):
            pass


def _job(plan: Plan, source: Source, calibration: CalibrationSet | None) -> dict[str, Any]:
    """What makes two runs the same job."""
    job: dict[str, Any] = {"plan": plan.digest, "source": source.checkpoint.fingerprint(), "sparkquant": version()}
    # All of this is in the plan's digest; spelled out, a refusal says what has changed.
    spelled = json.dumps(plan.recipe.as_json(), sort_keys=True)
    job |= {"recipe": plan.recipe.name, "method": plan.recipe.method.name}
    job["recipe digest"] = hashlib.sha256(spelled.encode()).hexdigest()[:16]
    job["shards"] = f"{len(plan.shards)} files of at most {max((s.bytes for s in plan.shards), default=0):,} bytes"
    if source.overlay:
        from sparkquant.live import overlay_digest

        job["overlay"] = overlay_digest(source.overlay)
    if calibration is not None or plan.recipe.method.delegated:  # both have a private work folder
        job["calibration"] = "none" if calibration is None else calibration.digest
    return job


def _stored(plan: Plan, names: Sequence[str]) -> list[OutputTensor]:
    return [tensor for name in names for tensor in plan.decisions[name].stored()]


def _write_side_files(
    staged: StagedCheckpoint,
    plan: Plan,
    checkpoint: Checkpoint,
    side_files: Mapping[str, Path],
    records: Records,
) -> None:
    """Everything beside the weights; config.json last, so that nothing loads before the folder is whole."""
    for name, path in side_files.items():
        staged.copy_file(name, path)
    staged.write_text("sparkquant/recipe.yaml", _recipe_text(plan.recipe))
    staged.write_text("sparkquant/plan.json", plan.to_json())
    for name, record in records.items():
        staged.write_text(f"sparkquant/{name}.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    staged.write_text("config.json", result_config(checkpoint.config, plan))


def _recipe_text(recipe: Recipe) -> str:
    """The recipe as its author wrote it, or spelled out where the text alone would give another one (`method=`)."""
    if recipe.text and recipe_from_text(recipe.text, source=recipe.source).as_json() == recipe.as_json():
        return recipe.text
    return yaml.safe_dump(recipe.as_json(), sort_keys=False, allow_unicode=True)


def _carried(checkpoint: Checkpoint, stays: Collection[Path]) -> list[str]:
    """Side files that the result takes over; records of an earlier job or quantization are not among them.

    What a model cannot do without is, whatever is calibrated on it.
    """
    names = [name for name in checkpoint.side_files() if name.split("/")[0] not in ("sparkquant", *OLD_CONFIGS)]
    return [name for name in names if is_required(name) or (checkpoint.path / name).resolve() not in stays]


def _inside(folder: Path, name: str) -> Path:
    """A side file's path; links may lead into the folder or into the hub cache's own blobs, nowhere else."""
    path = folder / name
    real, root = path.resolve(), folder.resolve()
    blobs = root.parent.parent / "blobs"
    if root not in real.parents and not (root.parent.name == "snapshots" and blobs in real.parents):
        raise CheckpointError(
            f"{path} is a link that leaves the checkpoint", hint="replace the link by a copy if the file belongs here"
        )
    if not real.is_file() or not os.access(path, os.R_OK):
        raise CheckpointError(f"{path} is no file that can be copied", hint="make it readable, fetch it, or remove it")
    if name in JSON_FILES:
        read_json(path)  # verification reads it: better now than after the work
    return path
