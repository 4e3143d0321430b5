"""Documents tell the truth: their commands run and print what they show, their examples parse, their YAML is valid."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from sparkquant.cli import app
from sparkquant.recipe_files import recipe_from_text
from tests.cli.running import ROOT, command, environment, invoke

README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str, *, marked: bool = True) -> list[str]:
    """Fenced blocks of a language; `marked` ones follow a line `<!-- run -->`."""
    mark = "<!-- run -->\n" if marked else ""
    return re.findall(rf"{mark}```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """An empty folder in which `examples/` is there."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def steps(block: str) -> Iterator[tuple[str, str]]:
    """Commands of a console block, each with the output shown for it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield line, output


def as_pattern(output: str) -> str:
    """A regex of shown output: a line `...` stands for any lines."""
    return "".join(r"(?:.*\n)*?" if line == "...\n" else re.escape(line) for line in output.splitlines(keepends=True))


@pytest.mark.parametrize("block", blocks(README, "console"))
def test_console_blocks_print_what_they_show(block: str, workplace: Path) -> None:
    for line, output in steps(block):
        words = shlex.split(line)
        assert words[0] == "sparkquant"
        result = subprocess.run(
            command(*words[1:]), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=workplace,
            env=environment(), check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout
        assert re.fullmatch(as_pattern(output), result.stdout), f"$ {line}\n{result.stdout}"


@pytest.mark.parametrize("block", blocks(README, "python"))
def test_python_blocks_run(block: str, workplace: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, cwd=workplace, env=environment(), check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_runnable_blocks_are_found() -> None:
    assert len(blocks(README, "console")) == 2
    assert len(blocks(README, "python")) == 2


@pytest.mark.parametrize("block", blocks(GUIDE, "yaml", marked=False))
def test_yaml_in_the_guide_is_a_recipe(block: str) -> None:
    assert recipe_from_text(block, source="guide").overrides


def parse(line: str) -> None:
    """Parse one `sparkquant ...` line down to its last verb without running it."""
    words = shlex.split(line.partition(" > ")[0].partition(" #")[0])
    assert words.pop(0) == "sparkquant"
    at: Any = typer.main.get_command(app)
    context = None
    name: str | None = "sparkquant"
    while True:
        context = at.make_context(name, list(words), parent=context)
        if not hasattr(at, "resolve_command"):
            return
        name, at, words = at.resolve_command(context, [*context._protected_args, *context.args])


VERBS = [
    [],
    ["plan"],
    ["quantize"],
    ["verify"],
    ["evaluate"],
    ["report"],
    ["diff"],
    ["publish"],
    ["recipes"],
    ["calibration"],
    ["calibration", "check"],
]
RECIPE_VERBS = [["recipes", verb] for verb in ("ls", "show", "copy", "lint", "schema")]


@pytest.mark.parametrize("verb", [*VERBS, *RECIPE_VERBS], ids=" ".join)
def test_every_help_has_an_example_that_parses(verb: list[str]) -> None:
    result = invoke(*verb, "--help")
    assert result.exit_code == 0
    lines = [line.strip() for line in result.stdout.splitlines()]
    examples = [line for line in lines if re.match(r"sparkquant (?!\[)[a-z]", line)]
    assert "Example:" in lines or "Examples:" in lines
    assert examples
    for line in examples:
        parse(line)
        assert verb == [] or line.startswith("sparkquant " + " ".join(verb))
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("document", [README, GUIDE], ids=["README", "recipes/README"])
def test_every_command_in_the_documents_parses(document: str) -> None:
    lines = re.findall(r"^\$ (sparkquant .*)$", document, re.MULTILINE)
    lines += re.findall(r"`(sparkquant [^`]+)`", document)
    assert lines
    for line in lines:
        parse(line)


def test_exit_codes_in_readme_and_help_agree() -> None:
    table = re.findall(r"^\| (\d+) \| (.*?) \|$", README, re.MULTILINE)
    shown = dict(re.findall(r"^ +(\d+) +(.*)$", invoke("--help").stdout, re.MULTILINE))
    assert [code for code, _ in table] == list(shown)


def test_demo_runs_the_quantized_weights(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(tmp_path / "demo-out")],
        capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "original   `moor(self, vessel: str, days: int=1)`" in result.stdout
    assert "quantized  `moor(" in result.stdout
    assert "(25 quantized modules ran)" in result.stdout


def test_every_example_is_run_here() -> None:
    assert [path.name for path in (ROOT / "examples").glob("*.py")] == ["demo.py"]


def test_documents_name_no_machine() -> None:
    for document in (README, GUIDE, (ROOT / "Makefile").read_text(encoding="utf-8")):
        assert not re.search(r"/(home|root|work|tmp|Users)/", document)
        assert os.uname().nodename not in document
