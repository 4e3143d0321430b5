"""Mixes as files: the shipped ones by name, others by path; and what else may stand where a mix is expected."""

from __future__ import annotations

import difflib
import glob
import importlib.resources
import os
from pathlib import Path

from sparkquant.calibration.mix import Mix, parse_mix
from sparkquant.errors import CalibrationError, RecipeError
from sparkquant.positions import Document

MAX_MIX_BYTES = 100_000
BARE_NAME = "conversations"
"""How a bare JSONL file is called in records: published records do not hold the names of people's files."""


def mix_folder() -> Path:
    """Where the shipped mixes and their conversations lie: inside the wheel, or in the source checkout."""
    packaged = Path(str(importlib.resources.files("sparkquant"))) / "_calibration"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parent.parent.parent / "calibration"


def mix_names() -> list[str]:
    """Names of the shipped mixes, sorted."""
    return sorted(path.stem for path in mix_folder().glob("*.yaml"))


def load_mix(spec: str | os.PathLike[str] | Mix) -> Mix:
    """A mix by shipped name, from a YAML file, or from one file of conversations (JSONL, or JSON with a list)."""
    if isinstance(spec, Mix):
        return spec
    path = Path(spec).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return mix_from_text(_read(path), source=str(path), folder=path.parent)
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        if not path.is_file():
            raise CalibrationError(f"{path}: no such file", hint="check the path")
        return _bare(path)
    if str(spec) in mix_names():
        name = f"{spec}.yaml"
        return mix_from_text(_read(mix_folder() / name), source=name, folder=mix_folder())
    near = difflib.get_close_matches(str(spec), mix_names(), n=1)
    raise CalibrationError(
        f"no calibration mix {str(spec)!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
        hint=f"shipped: {', '.join(mix_names())}; or pass a mix (.yaml), conversations (.jsonl) or token ids (.json)",
    )


def mix_from_text(text: str, *, source: str, folder: Path) -> Mix:
    """Parse the YAML text of a mix whose relative paths start at `folder`."""
    try:
        document = Document(text, source)
    except RecipeError as error:
        # The reader of YAML was made for recipes; its faults are the same, the kind of file is not.
        hint = "a mix is a short, plain map" if "recipe" in error.hint else error.hint
        raise CalibrationError(error.what, hint=hint, problems=error.problems) from None
    return parse_mix(document.value, source=source, folder=folder.absolute(), document=document)


def _bare(path: Path) -> Mix:
    files = {BARE_NAME: {"conversations": glob.escape(path.name)}}
    fields = {"name": BARE_NAME, "summary": "one file of conversations", "sources": files}
    return parse_mix(fields, source=str(path), folder=path.parent.absolute())


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_MIX_BYTES:
            raise CalibrationError(f"{path}: too large for a mix", hint="a mix is a page of YAML")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror or error}", hint="check the path") from None
    except UnicodeDecodeError:
        raise CalibrationError(f"{path}: not UTF-8 text", hint="save it as UTF-8") from None
