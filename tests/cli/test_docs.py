"""Documents tell the truth: their commands run and print what they show, their examples parse, their data is valid."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import sparkquant
from sparkquant.calibration.mix_files import mix_from_text
from sparkquant.cli import app
from sparkquant.recipe_files import recipe_from_text
from tests.cli.documents import CODE, Block, blocks, blocks_of, documents
from tests.cli.running import ROOT, environment, invoke

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in documents()}

STAND_INS = {"RECIPE": "qwen-hybrid-w4a16"}
"""Words of a small run that are no files."""

SMALLER = {"evaluate": ["--rows", "1", "--tokens", "128"], "quantize": ["--calibration", "rows.json"]}
"""Options that keep a small run small, unless the document gives them itself."""

EXITS = {"evaluate": {0, 4, 7}}
"""A row is too little to keep a limit by, or to measure it at all."""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """An empty folder in which `examples/` is there."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.fixture
def small_workplace(workplace: Path, quantized: Path) -> Path:
    """Also what the documents assume to lie there: a model, two results, rows, and a mix with logs and code."""
    for name in ("Qwen3.5-27B", "MODEL"):
        (workplace / name).symlink_to(ROOT / "examples" / "hybrid-5m")
    for name in ("hybrid-5m-w4a16", "first", "second"):
        shutil.copytree(quantized, workplace / name)
    rows = [[(7 * row + place) % 2000 for place in range(256)] for row in range(6)]
    (workplace / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (mix,) = (block for block in blocks("yaml") if block.document.startswith("calibration"))
    (workplace / "our-agent.yaml").write_text(mix.body, encoding="utf-8")
    (workplace / "src").mkdir()
    shutil.copy(ROOT / "examples" / "demo.py", workplace / "src")
    (workplace / "logs").mkdir()
    told = (ROOT / "calibration" / "reasoning.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    (workplace / "logs" / "day.jsonl").write_text("".join(map(_request, told)), encoding="utf-8")
    return workplace


def _request(line: str) -> str:
    """A conversation as a server would have logged it."""
    *before, answer = json.loads(line)["messages"]
    return json.dumps({"request": {"messages": before}, "response": {"choices": [{"message": answer}]}}) + "\n"


def as_pattern(output: str) -> str:
    """A regex of shown output: a line `...` stands for any lines, seconds for any number of seconds."""
    lines = output.splitlines(keepends=True)
    shown = "".join(r"(?:.*\n)*?" if line == "...\n" else re.escape(line) for line in lines)
    return re.sub(r"\d+\\\.\d\\ s\b", r"[\\d.]+\\ s", shown)


@pytest.fixture
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workplace as the current folder, with a cache of its own: one calibrated job runs at a time."""
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("XDG_CACHE_HOME", str(workplace / ".cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return workplace


# What runs


def test_every_block_says_whether_it_runs() -> None:
    unmarked = [str(block) for block in blocks(*CODE) if not block.marker]
    assert unmarked == [], "put a line `<!-- run -->` above them; tests/cli/documents.py lists the markers"
    assert [str(b) for b in blocks(*CODE) if b.marker.startswith("not run") and len(b.reason.split()) < 2] == []
    for path in documents():
        assert len(blocks_of(path)) == len(re.findall(r"^ *```\w+$", path.read_text(encoding="utf-8"), re.MULTILINE)), (
            path
        )


@pytest.mark.parametrize("block", blocks("console", marker="run"), ids=str)
@pytest.mark.usefixtures("here")
def test_console_blocks_print_what_they_show(block: Block) -> None:
    for line, output in block.steps():
        words = shlex.split(line)
        assert words[0] == "sparkquant"
        result = invoke(*words[1:])
        assert result.exit_code == 0, result.output
        assert re.fullmatch(as_pattern(output), result.output), f"$ {line}\n{result.output}"


@pytest.mark.parametrize("block", blocks("console", marker="run small"), ids=str)
@pytest.mark.usefixtures("small_workplace", "here")
def test_console_blocks_run_small(block: Block) -> None:
    for line, _ in block.steps():
        first, *words = shlex.split(line)
        assert first == "sparkquant"
        words = [STAND_INS.get(word, word) for word in words]
        verb = words[0]
        smaller = [] if SMALLER.get(verb, [""])[0] in words else SMALLER.get(verb, [])
        result = invoke(*words, *smaller)
        assert result.exit_code in EXITS.get(verb, {0}), f"$ {line}\n{result.output}"


@pytest.mark.parametrize("block", blocks("python", marker="run"), ids=str)
@pytest.mark.usefixtures("here")
def test_python_blocks_run(block: Block) -> None:
    exec(compile(block.body, str(block), "exec"), {"__name__": "__main__", "sparkquant": sparkquant})


@pytest.mark.parametrize("block", blocks("python", marker="run small"), ids=str)
@pytest.mark.usefixtures("small_workplace", "here")
def test_python_blocks_run_small(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparkquant, "evaluate", functools.partial(sparkquant.evaluate, rows=2, tokens=128))
    exec(compile(block.body, str(block), "exec"), {"__name__": "__main__", "sparkquant": sparkquant})


@pytest.mark.parametrize("block", blocks(*CODE, marker="not run"), ids=str)
def test_what_is_not_run_is_parsed(block: Block) -> None:
    if block.language == "python":
        compile(block.body, str(block), "exec")
        return
    lines = [line for line, _ in block.steps()] or block.body.splitlines()
    for line in lines:
        parse_any(line)


def parse_any(line: str) -> None:
    """Parse a command line of a document as far as the command is known here."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    if not words:
        return
    program = Path(words[0]).name
    if program == "sparkquant":
        parse(shlex.join(words))
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets), line
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {name for word in words for name in re.findall(r"\[([\w,]+)\]", word)} <= set(extras), line
        assert all((ROOT / words[i + 1]).is_file() for i, word in enumerate(words) if word == "-c"), line
    elif program == "vllm":
        for i, word in enumerate(words):
            if word == "--speculative-config":
                assert json.loads(words[i + 1])["method"], line
    else:
        assert program in ("python3", "pre-commit", "git", "hf"), f"{line}: a command that no test knows"


# Data


def test_yaml_in_the_documents_is_valid() -> None:
    for block in blocks("yaml"):
        if block.document.startswith("calibration"):
            assert mix_from_text(block.body, source=str(block), folder=ROOT).sources
        elif block.document.startswith("recipes"):
            assert recipe_from_text(block.body, source=str(block)).overrides


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_in_the_documents_is_valid(block: Block) -> None:
    shortened = re.sub(r"(?<!\")\.\.\.(?!\")", "", block.body)
    for line in shortened.splitlines():
        assert isinstance(json.loads(line), dict)


# Help


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


def verbs(at: Any = None, path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Every verb and group of verbs that the command line has."""
    at = typer.main.get_command(app) if at is None else at
    yield list(path)
    for name in getattr(at, "commands", {}):
        yield from verbs(at.get_command(None, name), (*path, name))


@pytest.mark.parametrize("verb", list(verbs()), ids=" ".join)
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


def test_every_command_in_the_documents_parses() -> None:
    lines = [line for block in blocks("console", "bash", "sh") for line, _ in block.steps()]
    lines = [line for line in lines if line.startswith("sparkquant ")]
    for document in DOCUMENTS.values():
        lines += re.findall(r"`(sparkquant [^`]+)`", document)
    assert len(lines) > 10
    named = [" ".join(verb) for verb in verbs()]
    for line in lines:
        if line.removeprefix("sparkquant ") not in named:  # a verb may be spoken of without its arguments
            parse(line)


def test_exit_codes_in_readme_and_help_agree() -> None:
    table = re.findall(r"^\| (\d+) \| (.*?) \|$", README, re.MULTILINE)
    shown = dict(re.findall(r"^ +(\d+) +(.*)$", invoke("--help").stdout, re.MULTILINE))
    assert [code for code, _ in table] == list(shown)


# Examples


@pytest.mark.slow  # .ci/run runs `make demo` itself
def test_demo_runs_the_quantized_weights(tmp_path: Path) -> None:
    # In a process of its own: the only example that a reader starts like this.
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
    for document in (*DOCUMENTS.values(), (ROOT / "Makefile").read_text(encoding="utf-8")):
        assert not re.search(r"/(home|root|work|tmp|Users)/", document)
        assert os.uname().nodename not in document
