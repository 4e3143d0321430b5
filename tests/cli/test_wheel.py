"""What is installed from a wheel: every file that the package opens, and commands that need no clone."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkquant.calibration.mix_files import mix_names
from sparkquant.recipe_files import recipe_names
from sparkquant.recipe_schema import recipe_schema
from tests.cli.running import DEMO, ROOT, environment

SHIPPED = {
    "sparkquant": "sparkquant",
    "recipes": "sparkquant/_recipes",
    "calibration": "sparkquant/_calibration",
    "evaluation": "sparkquant/_evaluation",
}
"""Folders of the repository, and where they lie in the wheel."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, by the backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT, capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is unpacked: a pure wheel is installed by that alone."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def shipped_files() -> Iterator[str]:
    """Names that the wheel must hold: all but what Python compiles."""
    for folder, inside in SHIPPED.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"


RUN = """
import json, sys
import sparkquant
from sparkquant.cli import app
from typer.testing import CliRunner
told = []
for line in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, line, prog_name="sparkquant")
    assert done.exit_code == 0, (line, done.output, done.exception)
    told.append(done.stdout)
print(json.dumps([sparkquant.__file__, told]))
"""


@pytest.fixture
def away(installed: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs commands of the installed package in one process outside of this checkout; what each printed."""
    env = environment({"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(tmp_path / "cache")})

    def run(*lines: list[object]) -> list[str]:
        words = json.dumps([[str(word) for word in line] for line in lines])
        line = [sys.executable, "-P", "-c", RUN, words]
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=500, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        where, told = json.loads(done.stdout)
        assert Path(where) == installed / "sparkquant" / "__init__.py"
        return list(told)

    return run


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    assert names == set(shipped_files())


def test_recipes_plans_and_calibration_need_no_clone(away: Callable[..., list[str]], tmp_path: Path) -> None:
    recipes, schema, _, checked = away(
        ["recipes", "ls", "--json"],
        ["recipes", "schema"],
        ["plan", DEMO, "-r", "qwen-hybrid-w4a16", "--out", tmp_path / "plan.json"],
        ["calibration", "check", "coding-agent", "--model", DEMO, "--rows", "8", "--allow", "few-tokens", "--json"],
    )
    assert [row["name"] for row in json.loads(recipes)] == recipe_names()
    assert json.loads(schema) == recipe_schema()
    assert json.loads((tmp_path / "plan.json").read_text())["recipe"]["name"] == "qwen-hybrid-w4a16"
    assert json.loads(checked)["rows"] == 8


@pytest.mark.slow
def test_a_checkpoint_is_made_judged_and_published_without_a_clone(
    away: Callable[..., list[str]], tmp_path: Path
) -> None:
    *_, published, _, _ = away(
        *(["calibration", "check", mix, "--model", DEMO, "--allow", "few-tokens", "--json"] for mix in mix_names()),
        ["quantize", DEMO, "-r", "qwen-hybrid-fp8", "-o", "out"],
        ["evaluate", "out", "--source", DEMO, "--rows", "2", "--tokens", "64"],
        ["publish", "out", "me/demo", "--dry-run", "--allow-missing", "validate"],
        ["report", "out", "-o", "report.html"],
        ["doctor", "--json"],
    )
    assert "nothing was sent" in published
    assert "<svg" in (tmp_path / "report.html").read_text()
