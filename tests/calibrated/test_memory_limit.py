"""A model several times larger than what the process may use is calibrated all the same, under a real limit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import build, wide_mlp
from tests.execution.runs import in_a_child

HIDDEN, INNER, LAYERS, ROWS = 1024, 4096, 96, 8
MIB = 2**20
LIMIT = 800 * MIB
"""Private writable memory of the process (RLIMIT_DATA); 370 MiB of it are the imports."""

CLASSES = (
    "attention.qkv", "attention.out", "linear_attention.qkvz", "linear_attention.out", "mlp.gate_up", "mlp.down",
)  # fmt: skip

_LIMITED = """
import resource, sys
source, recipe, out, rows, limit = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
import json, warnings
import torch
torch.set_num_threads(1)
import sparkquant
told = []
sparkquant.quantize(source, json.loads(recipe), out, calibration=rows, allow=("few-tokens", "no-thinking"),
                    max_memory=420 * 2**20, device="cpu", listener=lambda event: told.append(str(event)))
print(resource.getrlimit(resource.RLIMIT_DATA)[0])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2.5 GB and more of decoder."""
    folder = tmp_path_factory.mktemp("large") / "model"
    return build("qwen3_5_text", folder, layers=LAYERS, hidden=HIDDEN, change=wide_mlp(INNER))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "classes"),
    [("imatrix", CLASSES), ("gptq", ("attention.out", "linear_attention.out"))],
)
def test_a_model_three_times_the_memory_limit(
    method: str, classes: tuple[str, ...], large: Path, tmp_path: Path
) -> None:
    size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert size >= 3 * LIMIT, f"{size / MIB:.0f} MiB"
    generator = np.random.default_rng(1)
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps(generator.integers(0, 256, (ROWS, 64)).tolist()))
    recipe = {
        "name": "large",
        "summary": "int4 on a model that does not fit",
        "families": ["qwen3_5"],
        "schemes": dict.fromkeys(classes, "w4a16"),
        "method": {"name": method},
    }
    done = in_a_child(
        _LIMITED, large, json.dumps(recipe), tmp_path / "out", rows, LIMIT, XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    assert int(done.stdout) == LIMIT
    record = json.loads((tmp_path / "out" / "sparkquant" / "calibration.json").read_text())
    assert len(record["blocks"]) == LAYERS + 1
    assert all(0 < block["error"] < block["nearest_error"] for block in record["blocks"][:-1])
