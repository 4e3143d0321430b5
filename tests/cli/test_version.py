"""One place states the version: a record names the code that wrote it, not what is installed beside it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sparkquant
from tests.cli.running import ROOT, spawn

ASK = "import sparkquant; print(sparkquant.version())"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder of packages in which another version is installed, by its metadata."""
    info = tmp_path / "sparkquant-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sparkquant\nVersion: 9.9.9\n", encoding="utf-8")
    return tmp_path


def test_a_clone_knows_its_version_with_nothing_and_with_another_one_installed(other: Path) -> None:
    for path in ([ROOT], [ROOT, other], [other, ROOT]):
        places = ":".join(map(str, path))
        # Without the site module nothing that is installed is on the path.
        done = subprocess.run(
            [sys.executable, "-S", "-c", ASK], capture_output=True, text=True, env={"PYTHONPATH": places}, check=True
        )
        assert done.stdout.strip() == sparkquant.version()
    assert spawn("--version", env={"PYTHONPATH": f"{other}:{ROOT}"}).stdout == f"sparkquant {sparkquant.version()}\n"


def test_the_distribution_and_the_changelog_state_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    source = ROOT / project["tool"]["hatch"]["version"]["path"]
    stated = re.findall(r'^__version__ = "(.+)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert stated == [newest[1]] == [sparkquant.version()]
