"""`engine_routes`: where every quantized module of a plan or of a checkpoint runs, without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparkquant.decisions import Decision, Plan
from sparkquant.engine.ranks import Shared, letters_of
from sparkquant.engine.routing import CAPABILITIES, Load, Routes, routes_of
from sparkquant.engine.versions import engine_named, require_capability
from sparkquant.errors import UsageError
from sparkquant.layers import ENGINES


def engine_routes(
    subject: Plan | str | os.PathLike[str],
    version: str | None = None,
    tp: Sequence[int] = (1,),
    capability: str | None = None,
) -> Routes:
    """The kernel of every quantized module.

    subject     a plan, or the folder of a quantized checkpoint of any producer (its headers are read)
    version     `vllm==0.25.1` or `0.25`; without one the newest that loads the plan
    tp          tensor-parallel sizes
    capability  compute capability of the GPU; without one the target of the plan's recipe, or 12.1, and the others
                of `CAPABILITIES` as `elsewhere`

    Raises UsageError for an engine, a size or a capability that is not known.
    """
    if wrong := [size for size in tp if size < 1]:
        raise UsageError(f"tensor-parallel size {wrong[0]} is not positive", hint="pass sizes like 1,2")
    if capability is not None:
        require_capability(capability)
    if isinstance(subject, Plan):
        newest = subject.engines[-1] if subject.engines else ENGINES[-1]
        engine = engine_named(version or newest)
        loads = plan_loads(subject, engine.rules)
        target = capability or subject.recipe.target.capability
        elsewhere = () if capability else CAPABILITIES
        return routes_of(loads, engine, tp, target, elsewhere=elsewhere, unsplittable=_apart(subject, tp))
    from sparkquant.verification.loads import checkpoint_loads
    from sparkquant.verification.ranks import unsplittable
    from sparkquant.verification.subject import Serving, Subject, open_checkpoint

    engine = engine_named(version or ENGINES[-1])
    opened = Subject(open_checkpoint(Path(subject)), None, Serving(engine, tuple(tp), capability))
    elsewhere = () if capability else CAPABILITIES
    apart = unsplittable(opened, tp)
    loads = checkpoint_loads(opened)
    return routes_of(loads, engine, tp, capability or "12.1", elsewhere=elsewhere, unsplittable=apart)


def kernel_rows(
    plan: Plan, version: str | None = None, tp: Sequence[int] = (), capability: str | None = None
) -> list[dict[str, Any]]:
    """Where every quantized module of a plan runs, as plain JSON: the `kernels` of `plan --json`.

    One row for the modules that run alike, by engine version (those that have the family, or the one that is named),
    capability (the recipe's target and `CAPABILITIES`, or the one that is named) and tensor-parallel size (`tp`, or the
    recipe's). Rows are in a fixed order: the same plan and arguments give the same rows.
    """
    sizes = tuple(tp) or tuple(plan.recipe.target.tensor_parallel)
    found: list[dict[str, Any]] = []
    for engine in (version,) if version is not None else plan.layout.engines:
        routes = engine_routes(plan, engine, sizes, capability)
        for chip, rows in ((routes.capability, routes.rows), *routes.elsewhere.items()):
            where = {"engine": routes.engine.name, "rules": routes.engine.rules, "capability": chip}
            found += [{**where, **row.as_json()} for row in rows]
    return found


def _apart(plan: Plan, tp: Sequence[int]) -> dict[int, str]:
    """The sizes over which the engine cannot split the model."""
    rules = (plan.layout.rule_of(name) for name in plan.decisions)
    return Shared(plan.layout.sizes, letters_of(rule for rule in rules if rule is not None)).unsplittable(tp)


def plan_loads(plan: Plan, version: str) -> Iterator[Load]:
    """One load for every engine module that the plan quantizes."""
    groups: dict[str, list[Decision]] = {}
    for decision in plan.decisions.values():
        if decision.scheme is not None:
            groups.setdefault(decision.group or decision.module, []).append(decision)
    for name, decisions in groups.items():
        first = decisions[0]
        rules = [plan.layout.rule_of(d.tensor) for d in decisions]
        reason = next((text for rule in rules if rule is not None and (text := rule.plain_in(version))), "")
        assert first.scheme is not None
        is_moe = "experts" in name.rpartition(".")[2]
        yield Load(
            name=name,
            label=_experts(decisions) if is_moe else str(first.layer_class),
            scheme=first.scheme,
            scheme_label=first.scheme.label,
            parts=tuple((d.shape[-2] // max(1, len(d.parts)), d.shape[-1]) for d in _one_expert(decisions, is_moe)),
            row_parallel=any(rule is not None and rule.row_parallel for rule in rules),
            is_moe=is_moe,
            plain=reason,
            activation=plan.layout.activation,
            groups=max((rule.groups for rule in rules if rule is not None), default=0),
        )


def _experts(decisions: Sequence[Decision]) -> str:
    """`experts` for all of them: the engine builds one module."""
    return str(decisions[0].layer_class).partition(".")[0]


def _one_expert(decisions: Sequence[Decision], is_moe: bool) -> Sequence[Decision]:
    """Gate first, whose rows are the inner size and whose columns the hidden size."""
    if not is_moe:
        return decisions
    return sorted(decisions, key=lambda d: not str(d.layer_class).endswith("gate_up"))[:1]
