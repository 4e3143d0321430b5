"""`sparkquant recipes`: find, read, copy and check recipes."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Annotated

import typer

from sparkquant.cli.linting import lint
from sparkquant.cli.shell import Verbs, write, write_json
from sparkquant.cli.shell import show as put
from sparkquant.errors import UsageError

HELP = """Find, read, copy and check recipes.

\b
Examples:
  sparkquant recipes ls
  sparkquant recipes copy qwen-hybrid-w4a16 mine.yaml
"""
recipes = typer.Typer(cls=Verbs, name="recipes", help=HELP, no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[str, typer.Argument(metavar="NAME", help="A shipped recipe.", show_default=False)]


@recipes.command("ls")
def list_recipes(
    family: Annotated[
        str | None, typer.Option("--family", metavar="F", help="Only recipes for this model family.")
    ] = None,
    backends: Annotated[
        bool, typer.Option("--backends", help="What AutoRound, ModelOpt and llm-compressor can do here, and why not.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """List the shipped recipes, or with --backends what other quantizers can do.

    \b
    Examples:
      sparkquant recipes ls
      sparkquant recipes ls --family qwen3_5 --json
      sparkquant recipes ls --backends
    """
    from sparkquant.layouts import family_names
    from sparkquant.recipe_files import load_recipe, recipe_names

    if family is not None and family not in family_names():
        near = difflib.get_close_matches(family, family_names(), n=1)
        known = ", ".join(sorted(family_names()))
        raise UsageError(f"no family {family!r}", hint=f"did you mean {near[0]!r}?" if near else f"known: {known}")
    if backends:
        _list_backends(family, as_json=as_json)
        return
    found = [load_recipe(name) for name in recipe_names()]
    found = [recipe for recipe in found if family is None or family in recipe.families]
    if as_json:
        rows = [{"name": r.name, "summary": r.summary, "families": list(r.families)} for r in found]
        write_json(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    else:
        from sparkquant.cli.tables import recipes_text

        put([recipes_text(found)])


def _list_backends(family: str | None, *, as_json: bool) -> None:
    from sparkquant.quantizers import capabilities

    if as_json:
        rows = [row for row in capabilities() if family in (None, row["family"])]
        write_json(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        return
    from sparkquant.cli.backends import backends_text

    put(backends_text(family))


@recipes.command()
def show(name: Name) -> None:
    """Print a recipe as it is written.

    \b
    Example:
      sparkquant recipes show qwen-hybrid-w4a16
    """
    from sparkquant.recipe_files import load_recipe

    write(load_recipe(name).text)


@recipes.command()
def copy(
    name: Name,
    to: Annotated[
        Path | None, typer.Argument(metavar="[DEST]", help="A file or folder; the current folder by default.")
    ] = None,
) -> None:
    """Copy a recipe to start your own from. An existing file is never overwritten.

    \b
    Example:
      sparkquant recipes copy qwen-hybrid-w4a16 mine.yaml
    """
    from sparkquant.recipe_files import load_recipe

    text = load_recipe(name).text
    target = Path(f"{Path(name).stem}.yaml") if to is None else to
    target = target / f"{Path(name).stem}.yaml" if target.is_dir() else target
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{target} exists already", hint="choose another name, or remove it yourself") from None
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}", hint="pass a file in an existing folder") from None
    write(f"{target}\n")


recipes.command()(lint)


@recipes.command()
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors and CI.

    \b
    Example:
      sparkquant recipes schema > recipe.schema.json
    """
    from sparkquant.recipe_schema import recipe_schema_text

    write(recipe_schema_text())
