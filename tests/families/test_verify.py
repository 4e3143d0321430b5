"""Results of every recipe on every family by their headers, as each engine version sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkquant.checkpoint import Checkpoint
from sparkquant.hfconfig import result_config
from sparkquant.layers import ENGINES
from sparkquant.planning import make_plan
from sparkquant.recipe import parse_recipe
from sparkquant.recipe_files import load_recipe, recipe_names
from sparkquant.verification.gate import verify
from tests.families.configs import CASES, family_of
from tests.verification.conftest import findings
from tests.verification.headers import write_result

Family = Callable[[str], Path]
PAIRS = [(case, name) for case in CASES for name in recipe_names() if family_of(case) in load_recipe(name).families]
QUIET = {"files.missing"}
"""These small checkpoints have no tokenizer."""


def seen(folder: Path, **options: Any) -> set[str]:
    return findings(verify(folder, level="headers", **options)) - QUIET


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_every_version_takes_what_its_plan_says(case: str, name: str, family: Family, tmp_path: Path) -> None:
    out = write_result(family(case), name, tmp_path / "out")
    engines = make_plan(Checkpoint.open(family(case)), load_recipe(name)).engines
    assert seen(out) == set()
    for version in ENGINES:
        found = seen(out, engine=version)
        assert found == set() if version in engines else "rules.engine" in found, version


def _written(case: str, fields: dict[str, Any], family: Family, out: Path) -> Path:
    recipe = parse_recipe({"name": "trial", "summary": "a recipe of a test", "families": [family_of(case)], **fields})
    return write_result(family(case), recipe, out)


@pytest.mark.parametrize(
    ("case", "schemes", "good"),
    [
        ("kimi_linear", {"linear_attention.qkvz": "fp8"}, {"0.25", "0.26"}),
        ("lfm2", {"short_conv": "fp8"}, {"0.33"}),
        ("granitemoehybrid", {"experts.gate_up": "fp8", "experts.down": "fp8"}, {"0.33"}),
        ("jamba", {"mlp.gate_up": "fp8", "mlp.down": "fp8"}, set(ENGINES)),
        ("zamba2", {"attention.qkv": "fp8", "mlp.gate_up": "fp8", "mlp.down": "fp8"}, set(ENGINES)),
        ("falcon_h1", {"ssm.in": "fp8", "attention.out": "fp8"}, set(ENGINES)),
    ],
)
def test_versions_differ_where_their_model_classes_do(
    case: str, schemes: dict[str, str], good: set[str], family: Family, tmp_path: Path
) -> None:
    out = _written(case, {"schemes": schemes}, family, tmp_path / "out")
    assert seen(out) == set()
    assert {version for version in ENGINES if not seen(out, engine=version)} == good
    for version in set(ENGINES) - good:
        assert "rules.engine" in seen(out, engine=version)


@pytest.mark.parametrize(("case", "good"), [("nemotron_h", True), ("falcon_h1", False), ("zamba2", False)])
def test_ranks_share_whole_groups_of_a_mamba_projection(case: str, good: bool, family: Family, tmp_path: Path) -> None:
    out = _written(case, {"schemes": {"ssm.in": "fp8"}}, family, tmp_path / "out")
    assert seen(out, tp=(1,)) == set()
    assert seen(out, tp=(2,)) == (set() if good else {"rules.kernel"})


def _edited(out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    config = json.loads((out / "config.json").read_text())
    change(config["quantization_config"])
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("case", "targets", "version", "found"),
    [
        # The name of the weights is not the name that is asked for.
        ("granitemoehybrid dense", [r"re:.*mamba\.in_proj$"], "0.33", {"config.undeclared", "rules.dead_target"}),
        ("granitemoehybrid dense", [r"re:.*(?:mamba|mixer)\.in_proj$"], "0.33", set()),
        ("falcon_h1", [r"re:.*layers\.\d+\.mamba\.in_proj$"], "0.25", {"config.undeclared", "rules.dead_target"}),
        ("falcon_h1", [r"re:.*\.mixer\.in_proj$"], "0.25", set()),
        ("zamba2", [r"re:.*(?:mamba|mixer)\.in_proj$"], "0.25", set()),
        ("zamba2", [r"re:.*mamba\.in_proj$"], "0.26", {"config.undeclared", "rules.dead_target"}),
        ("nemotron_h", [r"re:^backbone.*mixer\.in_proj$"], "0.25", {"config.undeclared", "rules.dead_target"}),
        ("nemotron_h", [r"re:.*mixer\.in_proj$"], "0.25", set()),
    ],
)
def test_targets_are_compared_in_the_spelling_of_the_version(
    case: str, targets: list[str], version: str, found: set[str], family: Family, tmp_path: Path
) -> None:
    out = _written(case, {"schemes": {"ssm.in": "fp8"}}, family, tmp_path / "out")

    def change(block: dict[str, Any]) -> None:
        (group,) = block["config_groups"].values()
        group["targets"] = targets

    assert seen(_edited(out, change), engine=version) == found


def test_experts_are_looked_up_under_the_names_of_the_version(family: Family, tmp_path: Path) -> None:
    """0.25 asks for gate_proj, up_proj and down_proj of expert 0 whatever the checkpoint calls them."""
    schemes = {"experts.gate_up": "w4a16", "experts.down": "w4a16"}
    out = _written("lfm2_moe", {"schemes": schemes}, family, tmp_path / "out")

    def change(block: dict[str, Any]) -> None:
        (group,) = block["config_groups"].values()
        group["targets"] = [r"re:.*experts\.\d+\.w[123]$"]

    _edited(out, change)
    assert seen(out, engine="0.33") == set()
    assert "config.undeclared" in seen(out, engine="0.25")


def test_a_merged_module_of_a_newer_version_is_not_split(family: Family, tmp_path: Path) -> None:
    """OLMo's q, k, v and g are one module, beside attention whose q, k and v are another."""
    out = _written("olmo_hybrid", {"schemes": {"linear_attention.qkvz": "fp8"}}, family, tmp_path / "out")

    def change(block: dict[str, Any]) -> None:
        block["ignore"].append(r"re:.*linear_attn\.g_proj$")

    assert "rules.partial_ignore" in seen(_edited(out, change), engine="0.25")


def test_the_config_is_the_one_that_quantize_writes(family: Family, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(family("lfm2"))
    plan = make_plan(checkpoint, load_recipe("lfm2-w4a16"))
    out = write_result(family("lfm2"), "lfm2-w4a16", tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == json.loads(result_config(checkpoint.config, plan))
