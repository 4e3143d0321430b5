"""`sparkquant.verify`: every static check of a folder, in one report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sparkquant import events
from sparkquant.checkpoint import Checkpoint
from sparkquant.engine.versions import engine_named, require_capability
from sparkquant.errors import CheckpointError, UsageError
from sparkquant.report import Check, Report
from sparkquant.requantizing import as_16_bit
from sparkquant.source import local_path, locate
from sparkquant.verification.catalogue import LEVELS, settled
from sparkquant.verification.declared import check_config
from sparkquant.verification.folder import check_folder
from sparkquant.verification.identity import check_identity
from sparkquant.verification.kernels import check_kernels
from sparkquant.verification.matching import check_rules
from sparkquant.verification.origins import check_origins
from sparkquant.verification.protected import check_protected
from sparkquant.verification.ranks import check_ranks
from sparkquant.verification.stored_set import check_stored_set
from sparkquant.verification.subject import Serving, Subject, open_checkpoint

HEADER_CHECKS: tuple[Callable[[Subject], Iterator[Check]], ...] = (
    check_folder,
    check_stored_set,
    check_config,
    check_rules,
    check_ranks,
    check_kernels,
    check_protected,
    check_identity,
    check_origins,
)


def verify(
    folder: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    level: str = "default",
    engine: str | None = None,
    tp: Sequence[int] = (1,),
    capability: str | None = None,
    listener: events.Listener = events.ignore,
) -> Report:
    """Check a quantized checkpoint, made by this project or by another.

    level   "headers" (names, shapes, dtypes, config; without torch), "default" (every scale, and with `source` every
            kept tensor bit for bit) or "deep" (every value, and with `source` the dequantized weights against it)
    source  the checkpoint that it was made from: a folder, or a hub id as `quantize` takes it
    engine  a version of vLLM (`vllm==0.25.1`, `0.25`) by whose rules names are resolved and kernels chosen; without one
            all known versions must agree
    tp, capability  tensor-parallel sizes and compute capability that every quantized module must have a kernel for;
            `rules.kernel` holds the whole table (class, scheme, size of a rank, kernel, padding) as `measured`

    Every id of `sparkquant.verification.catalogue` is in the report: passed, failed, warned, or skipped with a reason.
    Raises CheckpointError when the folder, or the source, cannot be read at all.
    """
    if level not in LEVELS:
        raise UsageError(f"no level {level!r}", hint=f"one of {', '.join(LEVELS)}")
    serving = Serving(None if engine is None else engine_named(engine), _sizes(tp), capability)
    if capability is not None:
        require_capability(capability)
    # A source is the caller's own: its shards may be links to another disk.
    original = None if source is None else _in_16_bits(Checkpoint.open(_folder_of(source), strict=False))
    subject = Subject(open_checkpoint(local_path(folder)), original, serving)
    found = [check for part in HEADER_CHECKS for check in part(subject)]
    if level != "headers":
        from sparkquant.verification.values import check_values

        found += check_values(subject, deep=level == "deep", listener=listener)
    return Report.of(str(folder), settled(found, level, with_source=source is not None))


def _folder_of(source: str | os.PathLike[str]) -> Path:
    """Where a source lies. A folder is not judged here: what is wrong with it may be what is looked for."""
    path = local_path(source)
    return path if path.is_dir() else locate(source).checkpoint.path


def _in_16_bits(source: Checkpoint) -> Checkpoint:
    """A quantized source as `quantize` reads it; as it is stored where that cannot be."""
    try:
        return as_16_bit(source)
    except CheckpointError:
        return source


def _sizes(tp: Sequence[int]) -> tuple[int, ...]:
    if isinstance(tp, str) or not isinstance(tp, Sequence) or not all(type(size) is int for size in tp):
        raise UsageError(f"tensor-parallel sizes are a list of integers, not {tp!r}", hint="pass sizes like tp=(1, 2)")
    if wrong := [size for size in tp if size < 1]:
        raise UsageError(f"tensor-parallel size {wrong[0]} is not positive", hint="pass sizes like 1,2")
    return tuple(dict.fromkeys(tp)) or (1,)
