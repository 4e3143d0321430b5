"""Small checkpoints of every family, built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.families.builders import build


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`family("kimi_linear")`: the folder of a case of `configs.CASES`. Copy it before editing."""
    built: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in built:
            built[case] = build(case, tmp_path_factory.mktemp(case.replace(" ", "_")))
        return built[case]

    return get
