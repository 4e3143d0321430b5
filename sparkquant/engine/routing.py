"""Where every quantized module of a model runs: one table per engine version, capability and tensor-parallel size.

    loads (module, class, scheme, size) -> sizes of one rank -> kernel, padding, reason -> rows of equal ones

Only arithmetic on names and sizes: the same table comes from a plan and from a checkpoint's headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from sparkquant.engine.kernels import OURS, Form, Route, atomic_add_applies, route, route_experts
from sparkquant.engine.versions import Engine
from sparkquant.schemes import Scheme

REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj")
"""Leaves that every rank holds whole."""


@dataclass(frozen=True, slots=True)
class Load:
    """One quantized module of the engine.

    label  layer class, or the module's leaf where no layout knows the model
    parts  [N, K] of each fused part; of experts: gate and up, then down, of one expert
    plain  why the version at hand loads the module in 16 bits only; "" when it takes a scheme
    groups  how many equal groups its rows hold that ranks must share evenly; 0 is any
    activation  of experts: the function between their products, as config.json calls it
    """

    name: str
    label: str
    scheme: Scheme
    scheme_label: str
    parts: tuple[tuple[int, int], ...]
    row_parallel: bool = False
    is_moe: bool = False
    form: Form = OURS
    plain: str = ""
    activation: str = ""
    groups: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """Modules that run alike: `size` is (n, k) of one rank, for experts (inner, hidden)."""

    label: str
    scheme: str
    tp: int
    size: tuple[int, int]
    kernel: str
    padded: tuple[int, int] | None
    atomic_add: bool
    reason: str
    modules: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many modules run so."""
        return len(self.modules)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "class": self.label, "scheme": self.scheme, "tp": self.tp, "size": list(self.size),
            "kernel": self.kernel or "refused", "padded": list(self.padded) if self.padded else None,
            "atomic_add": self.atomic_add, "reason": self.reason, "count": self.count, "modules": list(self.modules),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Routes:
    """The whole table; `notes` say what is not certain about it, `elsewhere` are the rows on other capabilities.

    unsplittable  sizes over which the engine cannot split the model, each with the reason: all rows of them are refused
    """

    engine: Engine
    capability: str
    tp: tuple[int, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    elsewhere: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    unsplittable: Mapping[int, str] = field(default_factory=dict)

    @property
    def refused(self) -> tuple[Row, ...]:
        """Modules that the engine does not load."""
        return tuple(row for row in self.rows if not row.kernel)

    @property
    def atomic_add(self) -> str:
        """What `VLLM_MARLIN_USE_ATOMIC_ADD=1` changes, in words."""
        rows = [row for row in self.rows if row.atomic_add]
        if not rows:
            return "VLLM_MARLIN_USE_ATOMIC_ADD=1 changes nothing here: no dense Marlin layer has n < 2048 <= k"
        listed = ", ".join(f"{row.count} x {row.label} {list(row.size)}" + _at(row.tp) for row in rows)
        return f"VLLM_MARLIN_USE_ATOMIC_ADD=1 acts on {listed}: faster, and sums in no fixed order"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "engine": self.engine.name, "rules": self.engine.rules, "capability": self.capability,
            "tp": list(self.tp), "rows": [row.as_json() for row in self.rows], "atomic_add": self.atomic_add,
            "notes": list(self.notes),
            "elsewhere": {key: [row.as_json() for row in rows] for key, rows in self.elsewhere.items()},
            "unsplittable": {str(size): reason for size, reason in self.unsplittable.items()},
        }  # fmt: skip


def _at(tp: int) -> str:
    return f" at tp {tp}" if tp > 1 else ""


CAPABILITIES = ("12.1", "9.0", "8.6")
"""GB10, Hopper, consumer Ampere: where routes are told when no capability is named."""


def routes_of(
    loads: Iterable[Load],
    engine: Engine,
    tp: Sequence[int],
    capability: str,
    *,
    elsewhere: Sequence[str] = (),
    unsplittable: Mapping[int, str] = MappingProxyType({}),
) -> Routes:
    """The table of some loads, and their rows on other capabilities.

    `unsplittable` are sizes over which the engine cannot split the model (`engine.ranks`): all is refused there.
    """
    loads = list(loads)
    rows = _rows(loads, engine, tp, capability, unsplittable)
    others = {other: tuple(_rows(loads, engine, tp, other, unsplittable)) for other in elsewhere if other != capability}
    notes = [engine.note] if engine.note else []
    if any(row.kernel in ("DeepGEMM or Cutlass", "FlashInfer or Cutlass") for row in rows):
        notes.append("where two kernels are named, installed packages decide when the engine starts")
    if any("Marlin" in row.kernel and row.scheme.startswith("nvfp4") for row in rows):
        notes.append("VLLM_MARLIN_INPUT_DTYPE must be unset: with NVFP4 it stops the engine")
    elif any("Marlin" in row.kernel and row.scheme.startswith("w") for row in rows):
        notes.append("VLLM_MARLIN_INPUT_DTYPE must be unset: it rounds the activations of int4 layers too")
    return Routes(engine, capability, tuple(tp) or (1,), tuple(rows), tuple(notes), others, dict(unsplittable))


def _rows(
    loads: Iterable[Load], engine: Engine, tp: Sequence[int], capability: str, unsplittable: Mapping[int, str]
) -> list[Row]:
    found: dict[tuple[Any, ...], Row] = {}
    modules: dict[tuple[Any, ...], list[str]] = {}
    for load in loads:
        for size in tp or (1,):
            row = _row(load, engine.rules, size, capability, unsplittable.get(size, ""))
            key = (size, row.label, row.scheme, row.size, row.kernel, row.reason)
            found.setdefault(key, row)
            modules.setdefault(key, []).append(load.name)
    return [replace(found[key], modules=tuple(sorted(modules[key]))) for key in sorted(found)]


def refusals(loads: Iterable[Load], engine: Engine, tp: Sequence[int], capability: str) -> dict[str, str]:
    """Modules that no kernel takes with one of the sizes, each with the reason."""
    found: dict[str, str] = {}
    for load in loads:
        for size in tp or (1,):
            taken, _ = _routed(load, engine.rules, size, capability)
            if not taken.kernel:
                found.setdefault(load.name, taken.reason + (f" (tensor parallel {size})" if size > 1 else ""))
    return found


def _row(load: Load, version: str, tp: int, capability: str, unsplittable: str) -> Row:
    taken, size = _routed(load, version, tp, capability)
    if unsplittable:
        taken = Route("", None, unsplittable)
    n, k = taken.padded or size
    dense = not load.is_moe and taken.kernel.endswith("Marlin")
    atomic = dense and atomic_add_applies(n, k, capability=capability)
    return Row(load.label, load.scheme_label, tp, size, taken.kernel, taken.padded, atomic, taken.reason, (load.name,))


def _routed(load: Load, version: str, tp: int, capability: str) -> tuple[Route, tuple[int, int]]:
    hidden = load.parts[0][1]
    if load.is_moe:
        inner = load.parts[0][0]
        size = (-(-inner // tp), hidden)
        if load.plain or inner % tp:
            why = load.plain or f"the inner size {inner} does not divide over {tp} ranks"
            return Route("", None, why), size
        taken = route_experts(
            load.scheme, hidden, size[0], capability=capability, version=version, form=load.form,
            activation=load.activation,
        )  # fmt: skip
        return taken, size
    rows = sum(n for n, _ in load.parts)
    if load.name.endswith(REPLICATED):
        tp = 1
    # Key and value heads are repeated when there are fewer than ranks: parts are rounded up, not refused.
    size = (rows, -(-hidden // tp)) if load.row_parallel else (sum(-(-n // tp) for n, _ in load.parts), hidden)
    if load.plain:
        return Route("", None, load.plain), size
    if load.groups % tp:
        what = f"its rows hold {load.groups} groups, and the engine shards the scales of whole groups alone"
        return Route("", None, what), size
    if load.row_parallel and hidden % tp:
        return Route("", None, f"k={hidden} does not divide over {tp} ranks"), size
    n, k = size
    if load.scheme.name == "fp8_block" and tp > 1:
        fault = load.scheme.problem((rows, hidden), tp=tp, row_parallel=load.row_parallel)
        if fault:
            return Route("", None, fault), size
    return route(load.scheme, n, k, capability=capability, version=version, k_full=hidden, form=load.form), size
