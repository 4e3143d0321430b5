"""Every family end to end: what a recipe plans is stored, the rest is copied byte for byte, and the gate is green."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import sparkquant
from sparkquant.recipe_files import load_recipe, recipe_names
from tests.checkpoints import read_raw
from tests.families.configs import CASES, family_of

Family = Callable[[str], Path]


def _recipe_of(case: str) -> str:
    """The recipe that does most for a family."""
    fits = [name for name in recipe_names() if family_of(case) in load_recipe(name).families]
    return max(fits, key=lambda name: (len(load_recipe(name).schemes), name))


SERVED = [case for case in CASES if family_of(case) != "falcon_mamba"]
"""Every case that has a recipe."""


@pytest.mark.parametrize("case", SERVED)
def test_the_plan_is_what_is_stored(case: str, family: Family, tmp_path: Path) -> None:
    done = sparkquant.quantize(family(case), _recipe_of(case), tmp_path / "out", method="rtn")
    before, after = read_raw(family(case)), read_raw(tmp_path / "out")
    planned = {t.name: (t.dtype, t.shape) for d in done.plan.decisions.values() for t in d.stored()}
    assert {name: (dtype, shape) for name, (dtype, shape, _) in after.items()} == planned
    kept = {d.tensor for d in done.plan.decisions.values() if d.scheme is None}
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    assert done.report.ok
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[key] for key in CASES[case]} == CASES[case]
