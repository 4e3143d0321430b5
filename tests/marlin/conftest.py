"""One small result for all tests of the gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.marlin.serving import SOURCE


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`examples/hybrid-5m` in int4. Copy it before anything writes into it."""
    import sparkquant

    out = tmp_path_factory.mktemp("gate") / "w4a16"
    sparkquant.quantize(SOURCE, "qwen-hybrid-w4a16", out, method="rtn")
    return out
