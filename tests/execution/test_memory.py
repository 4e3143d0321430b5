"""Peak memory: the imports, three times the largest fusion group, and a constant; never the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

import sparkquant
from tests.checkpoints import build, wide_mlp
from tests.execution.runs import in_a_child

HIDDEN, INNER, LAYERS = 1024, 16384, 6
MIB = 2**20

_PEAK = (
    "import resource, sys, sparkquant\n"
    "quantize = sparkquant.quantize\n"
    "if len(sys.argv) > 1:\n    quantize(*sys.argv[1:])\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
)


def _peak(*arguments: object) -> int:
    return int(in_a_child(_PEAK, *arguments).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qwen-hybrid-w4a16", "qwen-hybrid-nvfp4-fp8", "qwen-hybrid-fp8"])
def test_peak_memory_is_that_of_the_largest_group(recipe: str, tmp_path: Path) -> None:
    source = build("qwen3_5_text", tmp_path / "in", layers=LAYERS, hidden=HIDDEN, change=wide_mlp(INNER))
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert size > 600 * 10**6
    group = 2 * INNER * HIDDEN * 2
    plan = sparkquant.plan(source, recipe)
    assert plan.footprint.working_bytes == 3 * group + 256 * MIB
    peak = _peak(source, recipe, tmp_path / "out") - _peak()
    assert peak <= plan.footprint.working_bytes, f"{peak / MIB:.0f} MiB"
