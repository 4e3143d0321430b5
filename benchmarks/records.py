"""`python -m benchmarks.records MODEL`: measure shipped recipes on a model, one record for each in recipes/records/.

Each recipe is carried out with its own method, and the result is compared with MODEL on the same rows. A record holds
the whole recipe, the conditions and everything that `evaluate` found, so that any two can be compared row by row.
`python -m benchmarks.guide` writes the tables of recipes/README.md from them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import sparkquant
from sparkquant import evidence
from sparkquant.calibration.loading import load_calibration
from sparkquant.checkpoint import Checkpoint
from sparkquant.recipe_files import load_recipe, recipe_folder, recipe_names

FOLDER = recipe_folder() / "records"
LEFT_OUT = ("ok", "checks")
"""Of an evaluation: they follow from the numbers and the recipe."""


def measured_recipes(model: Path) -> list[str]:
    """Shipped recipes for the family of a model."""
    family = sparkquant.plan(model, "qwen-hybrid-w4a16").layout.family
    return [name for name in recipe_names() if family in load_recipe(name).families]


def record(
    name: str, model: Path, *, data: Path, tasks: Path, calibration: Path, rows: int, tokens: int
) -> dict[str, Any]:
    """Quantize in a temporary folder, evaluate, and say under which conditions."""
    recipe = load_recipe(name)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        rows_of = calibration if recipe.method.calibrated else None
        made = sparkquant.quantize(model, recipe, out, calibration=rows_of)
        found = sparkquant.evaluate(out, source=model, data=data, tasks=tasks, rows=rows, tokens=tokens)
        seen = evidence.read(out)["quantize"].record
    result = {key: value for key, value in found.as_json().items() if key not in LEFT_OUT}
    source = Checkpoint.open(model)
    return {
        "recipe": recipe.as_json(),
        "model": {
            "name": model.name,
            "parameters": made.plan.totals["parameters"],
            "headers": source.header_digest,
        },
        "bytes": made.plan.totals["output_bytes"],
        "conditions": {
            "data": f"{rows} rows of {tokens} tokens of held-out code and chat text, never calibrated on",
            "tasks": found.recall["tasks"],
            "calibration": None if rows_of is None else load_calibration(rows_of, source).record(),
            "activations": "float32, weights dequantized, no engine",
            "device": "cpu",
        },
        "date": seen["date"],
        "versions": seen["versions"],
        "result": result,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a BF16 checkpoint that the recipes are for")
    parser.add_argument("--data", type=Path, required=True, help="held-out rows of token ids (.json)")
    parser.add_argument("--tasks", type=Path, required=True, help="recall tasks (.jsonl)")
    parser.add_argument(
        "--calibration", type=Path, required=True, help="rows of token ids for calibrated methods (.json)"
    )
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--recipe", action="append", help="one recipe, repeatable; all that fit by default")
    wanted = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name in wanted.recipe or measured_recipes(wanted.model):
        found = record(
            name, wanted.model, data=wanted.data, tasks=wanted.tasks, calibration=wanted.calibration,
            rows=wanted.rows, tokens=wanted.tokens,
        )  # fmt: skip
        text = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        result = found["result"]
        print(f"{name}: {found['bytes']:,} bytes, KL {result['kl_mean']:.5f}, top-1 {result['top1']:.2%}", flush=True)


if __name__ == "__main__":
    main()
