"""The tensors that a `plan.json` of this project promises, read without trusting the file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkquant.checkpoint import read_json
from sparkquant.errors import CheckpointError
from sparkquant.schemes import DTYPE_BYTES, KEEP, SCHEMES, Scheme, make_scheme

MAX_TENSORS = 5_000_000


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One stored tensor; `source` is the tensor that it is made from, `kept` says that it is copied."""

    dtype: str
    shape: tuple[int, ...]
    source: str
    kept: bool


def planned_tensors(path: Path) -> dict[str, PlannedTensor]:
    """Stored tensors by name. Raises CheckpointError when the file does not have a plan's form."""
    plan = read_json(path)
    decisions = plan.get("decisions")
    if not isinstance(decisions, list) or not decisions:
        raise _strange(path, "it has no decisions")
    found: dict[str, PlannedTensor] = {}
    for decision in decisions:
        if not isinstance(decision, Mapping):
            raise _strange(path, "a decision is no object")
        for name, tensor in _stored(decision, path):
            if name in found or len(found) >= MAX_TENSORS:
                raise _strange(path, f"{name[:200]} is planned twice" if name in found else "it plans too many tensors")
            found[name] = tensor
    return found


def planned_schemes(path: Path) -> list[Scheme]:
    """Every scheme that the plan gives to a tensor, once. Raises CheckpointError when one cannot be read."""
    found: dict[str, Scheme] = {}
    for decision in read_json(path)["decisions"]:
        spelled = decision.get("scheme", KEEP)
        if spelled == KEEP:
            continue
        try:
            fields = dict(spelled)
            name = fields.pop("scheme")
            options = fields if SCHEMES[name].is_integer else {}
            scheme = make_scheme(name, **options)
        except (TypeError, ValueError, KeyError):
            raise _strange(path, f"{str(decision.get('tensor'))[:200]}: scheme {str(spelled)[:80]}") from None
        found[scheme.label] = scheme
    return [found[label] for label in sorted(found)]


def planned_headers(path: Path) -> str | None:
    """Digest of the source headers that the plan was made for."""
    source = read_json(path).get("source")
    digest = source.get("headers") if isinstance(source, Mapping) else None
    return digest if isinstance(digest, str) else None


def overlaid_names(path: Path) -> frozenset[str]:
    """Source tensors whose weights came from a live model instead of the source's files."""
    source = read_json(path).get("source")
    names = source.get("overlaid") if isinstance(source, Mapping) else None
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def _stored(decision: Mapping[str, Any], path: Path) -> Iterator[tuple[str, PlannedTensor]]:
    source = decision.get("tensor")
    if not isinstance(source, str):
        raise _strange(path, "a decision names no tensor")
    outputs = decision.get("outputs")
    if outputs is None:
        dtype, shape = _form(decision.get("dtype"), decision.get("shape"), source, path)
        yield source, PlannedTensor(dtype, shape, source, True)
        return
    experts = decision.get("experts", 1)
    if not isinstance(outputs, list) or type(experts) is not int or not 0 < experts <= 100_000:
        raise _strange(path, f"{source[:200]}: its outputs or experts are malformed")
    for expert in range(experts):
        for output in outputs:
            if not isinstance(output, list) or len(output) != 3 or not isinstance(output[0], str):
                raise _strange(path, f"{source[:200]}: an output is not [name, dtype, shape]")
            dtype, shape = _form(output[1], output[2], source, path)
            yield output[0].replace("{expert}", str(expert)), PlannedTensor(dtype, shape, source, False)


def _form(dtype: Any, shape: Any, source: str, path: Path) -> tuple[str, tuple[int, ...]]:
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _strange(path, f"{source[:200]}: dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or not all(type(d) is int and d >= 0 for d in shape) or math.prod(shape) > 2**60:
        raise _strange(path, f"{source[:200]}: shape {str(shape)[:80]}")
    return dtype, tuple(shape)


def _strange(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", hint="restore the plan.json that was written with this checkpoint")
