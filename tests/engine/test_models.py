"""The package's naming of every family against what the model files of each version say, written down a second time."""

from __future__ import annotations

import re

import pytest

from sparkquant.engine.models import model_of
from sparkquant.engine.rules import VERSIONS, engine_modules
from sparkquant.layouts import layout_for
from tests.families.configs import CASES, family_of
from tests.families.engine_views import modules, view
from tests.families.shapes import shapes_of


def _served() -> list[tuple[str, str]]:
    served = [(case, version) for case, config in CASES.items() for version in layout_for(config).engines]
    return [(case, version) for case, version in served if version in VERSIONS and family_of(case) != "falcon_mamba"]


@pytest.mark.parametrize(("case", "version"), _served())
def test_the_engine_is_asked_about_the_same_modules_under_the_same_names(case: str, version: str) -> None:
    config = CASES[case]
    matrices = [n.removesuffix(".weight") for n, shape in shapes_of(config).items() if len(shape) > 1]
    names = [n for n in matrices if not re.search(r"norm|altup|embed|visual\.(?:patch|pos)|vision_tower", n)]
    names = [name for name in names if not name.endswith(("input_linear", "output_linear", "A_log"))]
    names = [name for name in names if not (case == "qwen4_exp" and name.startswith("mtp."))]
    model = model_of(config, version)
    ours = engine_modules(model, filter(model.takes_scheme, names))
    theirs = modules(view(family_of(case), config, version), names, version)
    mine = {module.name: (set(module.members), module.shards) for module in ours}
    wanted = {module.name: (set(module.members), module.shards) for module in theirs}
    head = {name for name in (*mine, *wanted) if name.endswith("lm_head")}
    assert {n: v for n, v in mine.items() if n not in head} == {n: v for n, v in wanted.items() if n not in head}


def test_draft_layers_of_qwen4_are_numbered_on_and_exact_entries_with_them() -> None:
    """A pattern with their number in the checkpoint stops matching; a name is renamed like the module."""
    config = CASES["qwen4_exp"]
    model = model_of(config, "0.33")
    assert model.engine_name("mtp.layers.0.self_attn.o_proj") == "mtp.layers.4.self_attn.o_proj"
    assert model.engine_entry("mtp.layers.0.self_attn.o_proj") == "mtp.layers.4.self_attn.o_proj"
    assert model.engine_entry(r"re:.*mtp\.layers\.0\..*") == r"re:.*mtp\.layers\.0\..*"
    assert model.engine_name("mtp.fc_hidden") == "mtp.fc_hidden"


@pytest.mark.parametrize("version", VERSIONS)
def test_configs_of_strangers_name_some_model(version: str) -> None:
    for model_type in (*(config["model_type"] for config in CASES.values()), None, 7, "x", ["falcon_h1"]):
        for odd in (None, "x", -1, 10**30, [], {}, [None], 1.5):
            keys = ("num_hidden_layers", "layers_block_type", "hybrid_layer_ids", "linear_attn_config", "text_config")
            assert model_of({"model_type": model_type, **dict.fromkeys(keys, odd)}, version).engine_name("a.b")
