"""Which engine versions load the result of a plan, and why others do not: the layouts' limits applied to decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sparkquant.decisions import Decision
from sparkquant.engine.routing import Load, refusals
from sparkquant.engine.versions import Engine
from sparkquant.errors import Problem
from sparkquant.layers import ENGINES, Layout, Placement

Blocked = Mapping[str, Sequence[tuple[Decision, str]]]
"""By engine version: quantized tensors that it loads in 16 bits only, each with the reason."""


def blocked_by_version(decisions: Iterable[Decision], placements: Mapping[str, Placement]) -> Blocked:
    """The quantized tensors that each version would have to load in 16 bits."""
    found: dict[str, list[tuple[Decision, str]]] = {version: [] for version in ENGINES}
    for decision in decisions:
        limits = placements[decision.tensor].rule.plain if decision.scheme is not None else ()
        for version in (v for limit in limits for v in limit.versions):
            found[version].append((decision, placements[decision.tensor].rule.plain_in(version)))
    return found


def engine_faults(layout: Layout, blocked: Blocked, engine: str | None) -> Iterator[Problem]:
    """Why the engine asked for, or else every one that has the family, cannot load the result."""
    if engine is not None and (absence := layout.absent_in(engine)):
        yield Problem(f"vLLM {engine}", absence, f"runs in {', '.join(layout.engines) or 'no supported version'}")
        return
    versions = (engine,) if engine is not None else layout.engines
    if versions and all(blocked[version] for version in versions):
        version = versions[-1]
        for decision, reason in blocked[version]:
            yield Problem(decision.tensor, f"vLLM {version}: {reason}", f"write `{decision.layer_class}: keep`")


def kernel_faults(loads: Iterable[Load], engine: Engine, tp: Sequence[int], capability: str) -> Iterator[Problem]:
    """Modules that no kernel of the engine takes, on the target's capability and the ranks asked for."""
    for name, reason in refusals(loads, engine, tp, capability).items():
        yield Problem(name, f"vLLM {engine.rules} on {capability}: {reason}", "keep its class in 16 bits")


def engine_notes(layout: Layout, blocked: Blocked) -> Iterator[str]:
    """Which versions do not load the result, and why."""
    if not layout.engines:
        yield f"no supported vLLM version runs this family: {layout.absent_in(ENGINES[-1])}"
    for version in layout.engines:
        if faults := blocked[version]:
            first, reason = faults[0]
            yield f"does not load in vLLM {version}: {reason} ({first.tensor}; {len(faults)} tensors)"
    for version in ENGINES if layout.engines else ():
        if absence := layout.absent_in(version):
            yield f"does not load in vLLM {version}: {absence}"
