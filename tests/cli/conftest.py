"""Checkpoints that the command line tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import DEMO, invoke
from tests.data.published import QWEN3_5_27B, QWEN3_5_35B_A3B, qwen3_5_27b_shapes, write_headers
from tests.data.shapes import tensor_shapes


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of a 27B, without its data."""
    folder = tmp_path_factory.mktemp("big") / "Qwen3.5-27B"
    return write_headers(folder, QWEN3_5_27B, qwen3_5_27b_shapes(), shards=18)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of a 35B mixture of experts, without its data."""
    folder = tmp_path_factory.mktemp("moe") / "Qwen3.5-35B-A3B"
    return write_headers(folder, QWEN3_5_35B_A3B, tensor_shapes(QWEN3_5_35B_A3B), shards=14)


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint, quantized by the command line. Copy it before editing."""
    out = tmp_path_factory.mktemp("quantized") / "out"
    result = invoke("quantize", DEMO, "-r", "qwen-hybrid-w4a16", "--method", "mse", "-o", out)
    assert result.exit_code == 0, result.stderr
    return out
