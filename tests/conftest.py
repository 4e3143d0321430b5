"""What every test may ask for: small checkpoints by name, and the evaluation models beside the checkout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.checkpoints import build

settings.register_profile(
    "quick",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "thorough", settings.get_profile("quick"), max_examples=2000, derandomize=False, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    # pyproject.toml deselects slow tests with `-m 'not slow'`; a marker expression of the command line still wins.
    if config.getoption("--slow") and config.option.markexpr == "not slow":
        config.option.markexpr = ""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoints("qwen3_5", shards=1)`: a small checkpoint, built once per set of options. Copy it before editing."""
    built: dict[str, Path] = {}

    def get(model_type: str, **options: Any) -> Path:
        key = f"{model_type} {sorted(options.items())}"
        if key not in built:
            built[key] = build(model_type, tmp_path_factory.mktemp(model_type), **options)
        return built[key]

    return get


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with evaluation models beside the checkout."""
    folder = Path(__file__).resolve().parent.parent.parent / "shared"
    if not (folder / "models").is_dir():
        pytest.skip("no evaluation models beside this checkout")
    return folder
