"""Configs, indices and headers of strangers through `plan`: a plan, or one clear error."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import SparkquantError
from sparkquant.planning import make_plan
from sparkquant.recipe import Recipe, parse_recipe
from sparkquant.verification.gate import verify
from tests.families.builders import build
from tests.families.configs import CASES, family_of
from tests.verification.test_hostile import paths_of, replaced, rewrite_header

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["mamba", "full_attention", "MEM*", "hybrid", "M" * 5000, [1] * 300, {"a": {"b": []}}]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def nothing(case: str) -> Recipe:
    return parse_recipe({
        "name": "trial", "summary": "a recipe of a test", "families": [family_of(case)], "schemes": {"lm_head": "keep"},
    })  # fmt: skip


@pytest.mark.parametrize(
    "case", ["kimi_linear", "nemotron_h", "qwen4_exp", "gemma4", "zamba2", "glm5_next", "mistral4"]
)
@given(data=st.data())
def test_any_value_in_a_config(case: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = copy.deepcopy(CASES[case])
    for _ in range(data.draw(st.integers(1, 3))):
        places = [place for place in paths_of(config) if place != ("model_type",)]
        config = replaced(config, data.draw(st.sampled_from(places)), data.draw(VALUES | st.just(...)))
    folder = _built(case, tmp_path_factory)
    (folder / "config.json").write_text(json.dumps(config))
    with suppress(SparkquantError):
        make_plan(Checkpoint.open(folder), nothing(case), engine="0.33", tp=(2,))
    with suppress(SparkquantError):
        verify(folder, level="headers", engine="0.33")


_FOLDERS: dict[str, Path] = {}


def _built(case: str, factory: pytest.TempPathFactory) -> Path:
    if case not in _FOLDERS:
        _FOLDERS[case] = build(case, factory.mktemp("fuzz"))
    return _FOLDERS[case]


@given(data=st.data())
def test_any_value_in_an_index(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = _built("lfm2", tmp_path_factory)
    path = folder / "model.safetensors.index.json"
    original = path.read_bytes()
    index = json.loads(original)
    fresh = VALUES | st.just(...) | st.sampled_from(["../../etc/passwd", "/etc/passwd", "config.json", ".", ""])
    path.write_text(json.dumps(replaced(index, data.draw(st.sampled_from(paths_of(index))), data.draw(fresh))))
    try:
        with suppress(SparkquantError):
            make_plan(Checkpoint.open(folder), nothing("lfm2"))
        with suppress(SparkquantError):
            verify(folder)
    finally:
        path.write_bytes(original)


@given(data=st.data())
def test_any_name_and_shape_in_a_header(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = _built("falcon_h1", tmp_path_factory)
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    original = path.read_bytes()
    names = st.text(max_size=12) | st.sampled_from([
        "model.layers.99999999999999999999.mlp.up_proj.weight", "model.layers.1.feed_forward.experts.7.up_proj.weight",
        "mtp.layers.0.mlp.gate_proj.weight", "model.layers.\u0661.mamba.D", "model.layers.01.mamba.D", "\ud800", "",
    ])  # fmt: skip

    def change(header: dict[str, Any]) -> dict[str, Any]:
        old = data.draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
        return {data.draw(names) if name == old else name: entry for name, entry in header.items()}

    rewrite_header(path, change)
    try:
        with suppress(SparkquantError):
            make_plan(Checkpoint.open(folder, strict=False), nothing("falcon_h1"))
        with suppress(SparkquantError):
            verify(folder)
    finally:
        path.write_bytes(original)


CHILD = """
import resource, sys
from contextlib import suppress
import numpy
from sparkquant.errors import SparkquantError
from sparkquant.planning import plan
from sparkquant.verification.gate import verify
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for level in ("headers", "default", "deep"):
    with suppress(SparkquantError):
        verify(sys.argv[1], level=level)
with suppress(SparkquantError):
    plan(sys.argv[1], "lfm2-w4a16")
print("survived")
"""
"""Both verbs with 400 MiB more than their imports take: a MemoryError would be a traceback."""


def _large_data(folder: Path) -> None:
    """A gigabyte of holes, in one tensor."""
    rows = 2**19

    def grow(header: dict[str, Any]) -> dict[str, Any]:
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        last = {"dtype": "BF16", "shape": [rows, 1024], "data_offsets": [max(ends), max(ends) + rows * 2048]}
        return {**header, "model.embed_tokens_more.weight": last}

    path = next(iter(sorted(folder.glob("*.safetensors"))))
    rewrite_header(path, grow)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + rows * 2048)
    (folder / "model.safetensors.index.json").unlink()


def _many_tensors(folder: Path, count: int) -> None:
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    empty = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
    rewrite_header(path, lambda header: {
        **header, **{f"model.layers.{i % 90}.feed_forward.experts.{i}.w1.weight": empty for i in range(count)},
    })  # fmt: skip


def _long_names(folder: Path) -> None:
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    empty = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
    rewrite_header(path, lambda header: {**header, **{"model.layers." * 9_000 + str(i): empty for i in range(40)}})


def _config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


ATTACKS: dict[str, Callable[[Path], None]] = {
    "a gigabyte of data": _large_data,
    "10,000 experts": partial(_many_tensors, count=10_000),
    "60,000 experts": partial(_many_tensors, count=60_000),
    "long names": _long_names,
    "a billion layers": _config(num_hidden_layers=10**9),
    "a billion experts": _config(num_experts=10**9, n_routed_experts=10**9, num_local_experts=10**9),
    "layer types by the million": _config(num_hidden_layers=10**6, layer_types=["conv"] * 10**6),
    "a deep tower": _config(vision_config={"depth": 10**9}),
    "an ignore list by the million": _config(
        quantization_config={"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["re:.*a"] * 10**6}
    ),
    "an index of nothing": lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"t{i}": "model-00001-of-00002.safetensors" for i in range(300_000)}})
    ) and None,
}  # fmt: skip
LONG = {"60,000 experts", "an index of nothing"}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
@pytest.mark.parametrize(
    "attack",
    [pytest.param(attack, id=name, marks=[pytest.mark.slow] * (name in LONG)) for name, attack in ATTACKS.items()],
)
def test_memory_and_time_are_bounded(attack: Callable[[Path], None], tmp_path: Path) -> None:
    folder = build("lfm2", tmp_path / "m")
    attack(folder)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, check=False, timeout=120,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout == "survived\n", done.stderr[-2000:]
