"""What `plan` does with a plan beside printing it: `--out` and `--explain`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from sparkquant.cli.shell import clean
from sparkquant.errors import UsageError

if TYPE_CHECKING:
    from sparkquant.decisions import Plan


def refuse_target(out: Path, source: str) -> None:
    """Refuse a file that `--out` must not write: anything that exists and is no plan, anything inside the source."""
    folder = Path(source)
    if folder.is_dir() and folder.resolve() in out.resolve().parents:
        raise UsageError(f"{out} lies inside the source", hint="choose a file beside it")
    if out.is_symlink() or out.exists():
        from sparkquant.comparison import read_plan

        try:
            if out.is_symlink() or not out.is_file():
                raise UsageError(f"{out} is no regular file", hint="")
            read_plan(out)
        except UsageError:
            hint = "choose another name, or remove it yourself; only a plan is replaced"
            raise UsageError(f"{out} exists already, and is no plan", hint=hint) from None


def write_file(out: Path, text: str) -> None:
    """Write beside the target, then rename: there is never half a file."""
    part: str | None = None
    try:
        handle, part = tempfile.mkstemp(prefix=f".{out.name[:100]}.", suffix=".part", dir=out.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(part).chmod(0o666 & ~mask)
        Path(part).replace(out)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}", hint="pass a file in an existing folder") from None
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                Path(part).unlink()


def explained(plan: Plan, name: str) -> str:
    """`--explain` with the names of the checkpoint, which may hold anything, made printable."""
    text = plan.explain(name)
    for foreign in {part for d in plan.decisions.values() for part in (d.tensor, d.shard, d.module, d.group)}:
        if not foreign.isprintable():
            text = text.replace(foreign, clean(foreign))
    return "\n".join(map(clean, text.split("\n"))) + "\n"
