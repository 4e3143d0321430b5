"""Name rules against the library's own classes: every live tensor is filled by exactly the checkpoint tensors meant."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sparkquant.layers import LayerClass, classify
from sparkquant.layouts import layout_for
from sparkquant.live import live_view
from tests.families.configs import CASES
from tests.families.published import PUBLISHED
from tests.families.shapes import shapes_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

UNSAVED = ("rotary_emb", "inv_freq")


@cache
def live_state(folder: str) -> dict[str, Any]:
    """state_dict of the class that config.json names, without data; buffers that are saved belong to it."""
    config = json.loads((Path(folder) / "config.json").read_text())
    loaded = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])._from_config(loaded)
    return dict(model.state_dict())


def _folder(config: dict[str, Any], tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return os.fspath(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_every_live_tensor_is_reached_by_the_checkpoint_tensors_meant(case: str, tmp_path: Path) -> None:
    config = CASES[case]
    _check(config, live_state(_folder(config, tmp_path)))


def _check(config: dict[str, Any], state: dict[str, Any]) -> None:
    layout, shapes = layout_for(config), shapes_of(config)
    filled: dict[str, int] = defaultdict(int)
    for name, placement in classify(layout, shapes).items():
        key, view = live_view(name, state, layout)
        if placement.layer_class is LayerClass.MTP:
            assert key is None, f"{name} is a tensor of the draft head, which the class does not have"
            continue
        assert key is not None, f"{name} reaches no live tensor"
        assert view is not None
        assert tuple(view.shape) == shapes[name], f"{name} is {shapes[name]}, its place {key} is {tuple(view.shape)}"
        filled[key] += math.prod(shapes[name])
    tied = {"lm_head.weight"} if layout.tied_head else set()
    again = _run_again(config)
    wanted = {key: value.numel() for key, value in state.items() if key not in tied and not key.startswith(again)}
    assert filled == wanted


def _run_again(config: dict[str, Any]) -> tuple[str, ...]:
    """Layers of Zamba2 that run a block which an earlier layer stores."""
    if config["model_type"] != "zamba2":
        return ()
    hybrids = [i for i, kind in enumerate(config["layers_block_type"]) if kind == "hybrid"]
    return tuple(f"model.layers.{i}.shared_transformer." for i in hybrids[config["num_mem_blocks"] :])


@pytest.mark.parametrize("case", CASES)
def test_whether_the_head_is_tied_when_the_config_is_silent(case: str, tmp_path: Path) -> None:
    config = json.loads(json.dumps(CASES[case]))
    for part in (config, config.get("text_config", {})):
        part.pop("tie_word_embeddings", None)
    loaded = transformers.AutoConfig.from_pretrained(_folder(config, tmp_path))
    assert layout_for(config).tied_head == bool(loaded.tie_word_embeddings)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_of_their_class(name: str, tmp_path: Path) -> None:
    config = PUBLISHED[name].config
    _check(config, live_state(_folder(config, tmp_path)))
