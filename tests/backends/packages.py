"""The packages behind the backends: skip visibly where one is absent, and sabotage adapters where it is there."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

import sparkquant
from sparkquant import delegated
from sparkquant.quantizers import QUANTIZERS

ALLOW = ("few-tokens", "no-thinking", "truncated")


def needs(method: str) -> pytest.MarkDecorator:
    """Skips without the package of a method, and says how to get it."""
    quantizer = QUANTIZERS[method]
    try:
        found = importlib.metadata.version(quantizer.distribution)
    except importlib.metadata.PackageNotFoundError:
        found = "not installed"
    wanted = found == quantizer.version
    reason = f"{quantizer.distribution} is {found}, {quantizer.version} is needed: make test-backends"
    return pytest.mark.skipif(not wanted, reason=reason)


def case(*values: Any, method: str, id: str) -> Any:
    """A slow case of a parametrized test that needs a method's package."""
    return pytest.param(*values, id=id, marks=[needs(method), pytest.mark.slow])


def quantized(source: Path, out: Path, recipe: Any, method: Any, rows: Path | None) -> sparkquant.Quantized:
    """`quantize` with another method; `rows` where it takes calibration."""
    given = {} if rows is None else {"calibration": rows, "allow": ALLOW}
    return sparkquant.quantize(source, recipe, out, method=method, **given)


def sabotaged(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run `code` in the child before the quantizer: what happens without a handling, with the real package."""
    lines = ["import sys", "from pathlib import Path", "from sparkquant import delegate", code]
    program = "\n".join([*lines, "delegate.main(Path(sys.argv[1]))"])
    monkeypatch.setattr(delegated, "CHILD", ("-c", program))
