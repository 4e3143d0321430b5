"""sparkquant: declarative quantization recipes for hybrid language models, with proof.

    import sparkquant
    sparkquant.plan("Qwen3.5-27B", recipe="qwen-hybrid-w4a16")
    sparkquant.quantize("Qwen3.5-27B", recipe="qwen-hybrid-w4a16", out="Qwen3.5-27B-W4A16")
    sparkquant.verify("Qwen3.5-27B-W4A16", source="Qwen3.5-27B")
    sparkquant.evaluate("Qwen3.5-27B-W4A16", source="Qwen3.5-27B")

Names are resolved when first used: planning must not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sparkquant.comparison import diff
    from sparkquant.conversion import Converted, convert
    from sparkquant.decisions import Plan
    from sparkquant.errors import SparkquantError
    from sparkquant.evaluation import Evaluation, evaluate, paired
    from sparkquant.execute import Quantized, quantize
    from sparkquant.marlin.bench import bench
    from sparkquant.marlin.bench_record import BenchRecord
    from sparkquant.marlin.validate import validate
    from sparkquant.marlin.validation import Validation
    from sparkquant.planning import plan
    from sparkquant.publishing import Publication, publish
    from sparkquant.recipe import Recipe
    from sparkquant.recipe_files import load_recipe
    from sparkquant.report import Check, Report
    from sparkquant.verification.gate import verify

_HOMES = {
    "BenchRecord": "marlin.bench_record",
    "Check": "report",
    "Converted": "conversion",
    "Evaluation": "evaluation",
    "Plan": "decisions",
    "Publication": "publishing",
    "Quantized": "execute",
    "Recipe": "recipe",
    "Report": "report",
    "SparkquantError": "errors",
    "Validation": "marlin.validation",
    "bench": "marlin.bench",
    "convert": "conversion",
    "diff": "comparison",
    "evaluate": "evaluation",
    "load_recipe": "recipe_files",
    "paired": "evaluation",
    "plan": "planning",
    "publish": "publishing",
    "quantize": "execute",
    "validate": "marlin.validate",
    "verify": "verification.gate",
}

__all__ = [
    "BenchRecord",
    "Check",
    "Converted",
    "Evaluation",
    "Plan",
    "Publication",
    "Quantized",
    "Recipe",
    "Report",
    "SparkquantError",
    "Validation",
    "bench",
    "convert",
    "diff",
    "evaluate",
    "load_recipe",
    "paired",
    "plan",
    "publish",
    "quantize",
    "validate",
    "verify",
    "version",
]


def version() -> str:
    """The version of this code, whatever is installed beside it: records must name what wrote them."""
    return __version__


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sparkquant' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sparkquant.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
