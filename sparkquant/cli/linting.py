"""`sparkquant recipes lint`: faults with their places, for people and as annotations of GitHub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from sparkquant.cli.shell import clean, stop, write
from sparkquant.errors import Problem, RecipeError

FAULTY = 2
Format = Literal["text", "github"]


def lint(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH", help="Recipe files, or folders of model repositories.", show_default=False),
    ],
    style: Annotated[
        str, typer.Option("--format", metavar="text|github", help="github: annotations of a workflow run.")
    ] = "text",
) -> None:
    """Report every fault of recipe files and model repositories.

    A folder, or a sparkquant.yaml beside a config.json, is a model repository:
    its recipe must stay inside it, and a dry plan is made against its own config
    and index; the weights need not be there.

    One line a fault: file:line:col: what; hint. Exit code 2 when there is one.

    \b
    Examples:
      sparkquant recipes lint mine.yaml
      sparkquant recipes lint . --format github
    """
    from sparkquant.errors import UsageError

    if style not in ("text", "github"):
        raise UsageError(f"no format {style!r}", hint="text or github")
    faulty = False
    for path in paths:
        problems, notes = _found(path)
        faulty = faulty or bool(problems)
        lines = map(annotation, problems) if style == "github" else (clean(problem) for problem in problems)
        write("".join(f"{line}\n" for line in lines))
        write("".join(f"{clean(path)}: note: {clean(note)}\n" for note in notes))
        if not problems:
            write(f"{clean(path)}: ok\n")
    if faulty:
        stop(FAULTY)


def _found(path: Path) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    from sparkquant.recipe_files import load_recipe
    from sparkquant.repository_lint import is_repository, lint_repository
    from sparkquant.repository_recipe import NAMES

    if path.is_dir():
        found = lint_repository(path, shown=str(path))
        return found.problems, found.notes
    if path.name in NAMES and path.is_file() and is_repository(path.parent):
        found = lint_repository(path.parent, shown=str(path.parent), recipe=path)
        return found.problems, found.notes
    try:
        # A bare word would be looked up among the shipped recipes; here it is a file.
        load_recipe(path if len(path.parts) > 1 or path.suffix in (".yaml", ".yml") else Path.cwd() / path)
    except RecipeError as error:
        return error.problems or (Problem("", error.what, ""),), ()
    return (), ()


def annotation(problem: Problem) -> str:
    """A workflow command of GitHub; what would end it, or begin another one, is escaped as its runner reads it back."""
    match = re.fullmatch(r"(.+?):(\d+):(\d+)", problem.where)
    what = problem.what + (f"; {problem.hint}" if problem.hint else "")
    if match is None:
        return f"::error::{_data(f'{problem.where}: {what}' if problem.where else what)}"
    file = _data(match[1]).replace(":", "%3A").replace(",", "%2C")
    return f"::error file={file},line={match[2]},col={match[3]}::{_data(what)}"


def _data(text: str) -> str:
    return "".join(_escaped(text))


def _escaped(text: str) -> Iterator[str]:
    special = {"%": "%25", "\r": "%0D", "\n": "%0A"}
    for character in text:
        yield special.get(character, character if character.isprintable() else clean(character))
