"""`sparkquant publish`: the verb, and what it says of a publication."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sparkquant.cli.progress import progress
from sparkquant.cli.shell import clean, write, write_json


def publish(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A result of quantize.", show_default=False)],
    repository: Annotated[
        str, typer.Argument(metavar="REPO", help="The hub repository, owner/name.", show_default=False)
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and write the card; no network, no token, nothing is sent.")
    ] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Create a private repository; refuse a public one.")
    ] = False,
    branch: Annotated[
        str | None, typer.Option("--branch", metavar="NAME", help="The branch to publish on instead of main.")
    ] = None,
    allow_missing: Annotated[
        list[str] | None,
        typer.Option("--allow-missing", metavar="VERB", help="Publish without this verb's evidence (repeatable)."),
    ] = None,
    base_model: Annotated[
        str, typer.Option("--base-model", metavar="ID", help="Hub id of the source, where quantize took a folder.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Upload a checkpoint with its card and its evidence, and tag it with the digest of its plan.

    The folder is checked again first. Evidence of quantize, verify, evaluate and
    validate must be there, speak of exactly these files, and have passed: exit
    code 4 otherwise, with what to run. An interrupted upload goes on with the
    same command.

    \b
    Examples:
      sparkquant publish Qwen3.5-27B-W4A16 me/Qwen3.5-27B-W4A16 --dry-run
      sparkquant publish OUT me/model --private --allow-missing validate
    """
    from sparkquant.publishing import publish as send

    with progress() as listener:
        made = send(
            out,
            repository,
            dry_run=dry_run,
            private=private,
            branch=branch,
            allow_missing=tuple(allow_missing or ()),
            base_model=base_model,
            listener=listener,
        )
    if as_json:
        write_json(json.dumps(made.as_json(), indent=1, ensure_ascii=False) + "\n")
        return
    from sparkquant.cli.tables import size

    told = f"{len(made.files)} files, {size(made.bytes)}, status {made.standing}"
    write(f"{made.repository} ({clean(made.branch)}): {told}\n")
    write("".join(f"removed from the branch: {clean(name)}\n" for name in made.removed))
    if dry_run:
        write("".join(f"  {clean(name)}  {size(count)}\n" for name, count in made.files.items()))
        write(f"would be tagged {made.tag}\nnothing was sent; the card is {clean(out / 'README.md')}\n")
    else:
        write(f"revision {made.revision}\ntagged {made.tag}\n{made.url}\n")
