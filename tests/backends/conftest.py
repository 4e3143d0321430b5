"""Rows of ids, a private cache, one thread, and a checkpoint whose gates are wide enough to be quantized."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import checkpoints as small
from tests.checkpoints import config_of, shapes_of, write_json, write_shards

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import this checkout, run on one thread and keep their work folders in the test's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(torch, "get_num_threads", torch.get_num_threads)


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 rows of ids of several lengths."""
    generator = torch.Generator().manual_seed(5)
    made = [
        torch.randint(0, 256, (length,), generator=generator).tolist() for length in (64, 64, 80, 64, 96, 64, 64, 70)
    ]
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    path.write_text(json.dumps(made))
    return path


@pytest.fixture(scope="session")
def wide_gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense hybrid with 32 value heads: in_proj_a and in_proj_b have 32 rows, which AutoRound takes for its own."""
    config = config_of("qwen3_5")
    config["text_config"] |= {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 16,
                              "linear_value_head_dim": 16}  # fmt: skip
    folder = tmp_path_factory.mktemp("wide")
    tensors = {}
    for name, shape in shapes_of(config).items():
        kind = "F32" if name.endswith(("A_log", "linear_attn.norm.weight")) else "BF16"
        tensors[name] = (kind, shape, small._encode(small._values(name, shape, 0), kind))
    write_json(folder / "config.json", config)
    write_shards(folder, tensors, shards=2)
    small._write_side_files(folder, vision=True)
    return folder


Checkpoints = Callable[..., Path]
