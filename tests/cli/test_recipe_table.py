"""The README's table of recipes holds what `plan` counts: every recipe of the Qwen hybrids, every size."""

from __future__ import annotations

import re
from pathlib import Path

from sparkquant import plan
from sparkquant.recipe_files import load_recipe, recipe_names

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEMO = ROOT / "examples" / "hybrid-5m"


def row_of(name: str, dense: Path, sparse: Path) -> str:
    """Everything that a row of the table says, but for its last column."""
    whole, mixture, small = (plan(folder, name) for folder in (dense, sparse, DEMO))
    size = whole.totals["output_bytes"]
    cells = (
        f"`{name}`", f"{size / 2**30:.2f}", f"{size:,}", f"{whole.totals['bits_per_weight']:.2f}",
        f"{whole.footprint.decode_ceiling_tps:.1f}", f"{mixture.totals['output_bytes'] / 2**30:.2f}",
        f"{small.totals['output_bytes'] / 2**20:.2f}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def test_the_table_has_every_recipe_with_its_sizes(big: Path, moe: Path) -> None:
    wanted = [name for name in recipe_names() if "qwen3_5" in load_recipe(name).families]
    rows = [row_of(name, big, moe) for name in wanted]
    assert [row for row in rows if row not in README] == []
    assert set(re.findall(r"^\| `(qwen-hybrid-[a-z0-9-]+)` \| \d+\.\d+ \| [\d,]{9,}", README, re.MULTILINE)) == set(
        wanted
    )
