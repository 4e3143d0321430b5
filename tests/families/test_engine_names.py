"""The config of every plan under the engine's own lookups: quantized modules are found, kept ones never in part."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkquant.checkpoint import Checkpoint
from sparkquant.decisions import Plan
from sparkquant.engine.patterns import Entries, Pattern
from sparkquant.engine.rules import EngineModule, Ignored, ignored, matched_target
from sparkquant.hfconfig import quantization_config
from sparkquant.layers import LayerClass
from sparkquant.planning import make_plan
from sparkquant.recipe import Recipe, parse_recipe
from sparkquant.recipe_files import load_recipe, recipe_names
from tests.families.configs import CASES, family_of
from tests.families.engine_views import modules, view

Family = Callable[[str], Path]


def _pairs() -> list[tuple[str, str]]:
    return [(case, name) for case in CASES for name in recipe_names() if family_of(case) in load_recipe(name).families]


class _Config:
    def __init__(self, plan: Plan) -> None:
        block = quantization_config(plan)
        assert block is not None
        self.ignore = Entries([Pattern(text) for text in block["ignore"]])
        groups = list(block["config_groups"].values())
        self.targets = Entries([Pattern(text) for group in groups for text in group["targets"]])
        self.label = [self._label(group) for group in groups for _ in group["targets"]]

    @staticmethod
    def _label(group: dict[str, Any]) -> str:
        weights = group["weights"]
        return f"{weights['num_bits']}-bit {weights['type']} {weights['strategy']} {weights.get('group_size')}"

    def built(self, module: EngineModule, version: str) -> set[str | None]:
        state = ignored(module, self.ignore, version)
        assert state is not Ignored.PARTIAL, f"{module.name}: ignored in part by {version}"
        if state is Ignored.YES:
            return {None}
        found = matched_target(module, self.targets, version)
        return {None if hit is None else self.label[hit] for hit in found}


def _check(plan: Plan, case: str) -> None:
    config = _Config(plan)
    by_module = {d.module: d for d in plan.decisions.values() if len(d.shape) > 1}
    for version in plan.engines:
        seen = view(family_of(case), CASES[case], version)
        reached: set[str] = set()
        for module in modules(seen, by_module, version):
            schemes = {by_module[name].scheme.label if by_module[name].scheme else None for name in module.members}  # type: ignore[union-attr]
            assert len(schemes) == 1, f"{module.name} of {version} holds {schemes}"
            built = config.built(module, version)
            assert len(built) == 1, f"{module.name} of {version} is built as {built}"
            assert (built == {None}) == (schemes == {None}), f"{module.name} of {version}: {schemes}, built as {built}"
            reached.update(module.members)
        missed = [d.tensor for name, d in by_module.items() if d.scheme is not None and name not in reached]
        assert not missed, f"{version} builds these without a config: {missed[:3]}"


@pytest.mark.parametrize(("case", "name"), _pairs())
def test_every_recipe_loads_in_the_versions_that_its_plan_names(case: str, name: str, family: Family) -> None:
    _check(make_plan(Checkpoint.open(family(case)), load_recipe(name)), case)


def _everything(case: str, plan: Plan, scheme: str) -> Recipe:
    """All classes of a checkpoint in one scheme, as far as any version takes it."""
    layout = plan.layout
    classes = {c for c in layout.linear_classes if c is not LayerClass.MTP} - set(layout.never_quantized)
    drop = {LayerClass.LM_HEAD} if layout.tied_head else set()
    fields: dict[str, Any] = {
        "name": "all", "summary": "everything in one scheme", "families": [layout.family],
        "schemes": {str(c): scheme for c in classes - drop},
    }  # fmt: skip
    return parse_recipe(fields)


@pytest.mark.parametrize("case", [c for c in CASES if family_of(c) != "falcon_mamba"])
def test_all_classes_in_fp8_load_wherever_the_plan_says_so(case: str, family: Family) -> None:
    checkpoint = Checkpoint.open(family(case))
    first = make_plan(checkpoint, parse_recipe({
        "name": "none", "summary": "a placeholder", "families": [family_of(case)], "schemes": {"lm_head": "keep"},
    }))  # fmt: skip
    plan = make_plan(checkpoint, _everything(case, first, "fp8"))
    assert any(d.scheme for d in plan.decisions.values())
    _check(plan, case)


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe", "glm_moe_dsa", "nemotron_h"])
def test_an_eight_bit_draft_head_is_reached_and_its_rest_is_not(case: str, family: Family) -> None:
    recipe = parse_recipe({
        "name": "draft", "summary": "an 8-bit draft head", "families": [family_of(case)],
        "schemes": {"experts.gate_up": "w4a16", "experts.down": "w4a16"},
        "unprotect": {"mtp": {"scheme": "fp8", "why": "the official release has it"}},
    })  # fmt: skip
    plan = make_plan(Checkpoint.open(family(case)), recipe)
    draft = [d for d in plan.decisions.values() if d.layer_class is LayerClass.MTP]
    assert {d.scheme.label for d in draft if d.scheme} == {"fp8"}
    assert all(d.scheme is None for d in draft if re.search(r"eh_proj|norm|head|embed|gate\.|latent", d.tensor))
    _check(plan, case)


def test_an_override_is_spelled_under_the_engines_own_layer_numbers(family: Family) -> None:
    for case in ("falcon_h1", "zamba2"):
        recipe = parse_recipe({
            "name": "split", "summary": "two schemes by layer", "families": [case], "schemes": {"ssm.in": "fp8"},
            "overrides": [{"layers": [1], "class": "ssm.in", "scheme": "w8a16", "why": "another scheme"}],
        })  # fmt: skip
        _check(make_plan(Checkpoint.open(family(case)), recipe), case)
