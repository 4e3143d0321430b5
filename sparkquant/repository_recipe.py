"""The recipe that a model repository brings along: found, told from other tools' files, and kept inside the repository.

It is a stranger's: plain data (no alias, no tag, no code), extending shipped recipes alone, and calibrating on shipped
mixes or on files of the repository. A mix that fetches data from elsewhere, or leads out, is refused.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from sparkquant.errors import CalibrationError, CheckpointError, Problem, RecipeError
from sparkquant.events import Listener, Said, ignore
from sparkquant.positions import Document
from sparkquant.recipe import Recipe
from sparkquant.recipe_files import MAX_RECIPE_BYTES, load_recipe, recipe_from_text

NAMES = ("sparkquant.yaml", "recipe.yaml")
"""Where a repository's recipe lies; the first that is there counts."""

DEFAULT_RECIPE = "qwen-hybrid-w4a16"
OURS = frozenset({"schemes", "extends", "families"})
"""Keys that tell a recipe of ours from the recipe.yaml that llm-compressor leaves in its results."""


def recipe_path(folder: Path) -> Path | None:
    """The recipe of a repository; None when it has none. A link that leaves the repository is an error."""
    for name in NAMES:
        path = folder / name
        if not path.exists() and not path.is_symlink():
            continue
        if not _readable(path, folder):
            raise CheckpointError(f"{path} is no regular file of this folder", hint="replace it by the file itself")
        if name == NAMES[0] or _is_ours(path):
            return path
    return None


def _readable(path: Path, folder: Path) -> bool:
    from sparkquant.verification.subject import readable

    return readable(path, folder)


def _is_ours(path: Path) -> bool:
    try:
        fields = Document(_text(path), path.name).value
    except RecipeError:
        return True  # its faults are told where it is read
    return not isinstance(fields, dict) or not fields or bool(OURS & fields.keys())


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_RECIPE_BYTES + 1)
        if len(raw) > MAX_RECIPE_BYTES:
            raise RecipeError(f"{path}: too large for a recipe", hint="a recipe is a page of YAML")
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not UTF-8 text", hint="save it as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}", hint="make it readable") from None


def repository_recipe(path: Path, *, shown: str = "") -> Recipe:
    """Parse and confine the recipe of a repository; RecipeError with every fault. `shown` names the file in places."""
    text = _text(path)
    source = shown or str(path)
    recipe = recipe_from_text(text, source=source)
    faults = list(confinement_faults(recipe, path.parent, Document(text, source)))
    if faults:
        raise RecipeError(
            f"{source}: reaches out of its repository", hint="name a shipped mix, or files beside it", problems=faults
        )
    return recipe


def chosen_recipe(folder: Path, listener: Listener = ignore) -> Recipe:
    """What is applied when nobody names a recipe: the repository's own, or the default."""
    path = recipe_path(folder)
    if path is None:
        return load_recipe(DEFAULT_RECIPE)
    recipe = repository_recipe(path)
    listener(Said(f"recipe {recipe.name!r}: {path.name} of the repository"))
    return recipe


def calibration_of(recipe: Recipe, folder: Path) -> str:
    """The mix of a recipe: a shipped name, or a path; one in a repository's own recipe starts at the repository."""
    own = next((path for name in NAMES if str(path := folder / name) == recipe.source), None)
    if own is None or not _is_path(recipe.calibration.mix):
        return recipe.calibration.mix
    repository_recipe(own)
    return str(folder / recipe.calibration.mix)


def kept_at_home(folder: Path, calibration: str | os.PathLike[str] | None = None) -> set[Path]:
    """Files of a model folder that no result takes over, resolved: its own recipe, and what is calibrated on.

    Results are published, and people's conversations are not. `calibration` is what the caller named instead.
    """
    own = recipe_path(folder)
    found = set() if own is None else {own.resolve()}
    with suppress(RecipeError, CalibrationError):  # what is faulty names nothing; whoever applies it is told
        if own is not None:
            found |= _read_by(calibration_of(repository_recipe(own), folder))
    with suppress(CalibrationError):
        found |= set() if calibration is None else _read_by(os.fspath(calibration))
    return found


def _read_by(mix: str) -> set[Path]:
    if not _is_path(mix):
        return set()
    from sparkquant.calibration.source_files import files_of

    return {path.resolve() for path in files_of(mix)}


def _is_path(mix: str) -> bool:
    return "/" in mix or "\\" in mix or PurePosixPath(mix).suffix != "" or mix.startswith((".", "~"))


def confinement_faults(recipe: Recipe, folder: Path, document: Document) -> Iterator[Problem]:
    """What of a recipe leads out of its repository."""
    mix = recipe.calibration.mix
    if not _is_path(mix):
        return
    place = document.place(("calibration", "mix"))
    if fault := _path_fault(mix, folder):
        yield Problem(place, f"calibration.mix {mix!r} {fault}")
    elif PurePosixPath(mix).suffix in (".yaml", ".yml"):
        yield from _mix_faults(folder / mix, folder)


def _path_fault(name: str, folder: Path) -> str:
    """Why a path is not one of the repository; empty when it is."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not parts or name.startswith(("/", "~", "\\")) or ".." in parts or ":" in parts[0]:
        return "leads out of the repository"
    if any(part.startswith(".") for part in parts):
        return "names a hidden file"
    path = folder / name
    if not path.exists() and not path.is_symlink():
        return "is no file of the repository"
    return "" if _readable(path, folder) else "is no regular file of the repository"


def _mix_faults(path: Path, folder: Path) -> Iterator[Problem]:
    from sparkquant.calibration.mix_files import mix_from_text

    text = _text(path)
    shown = path.relative_to(folder).as_posix()
    document = Document(text, shown)
    mix = mix_from_text(text, source=shown, folder=path.parent)
    for name, source in mix.sources.items():
        at = ("sources", name, source.kind)
        if source.kind == "hub":
            yield Problem(document.place(at), f"source {name!r} fetches {source.hub} from the hub", "add the data here")
            continue
        for pattern in (*source.conversations, *source.text, *source.table):
            if fault := _pattern_fault(pattern, path.parent, folder):
                yield Problem(document.place(at), f"source {name!r}: {pattern!r} {fault}")


def _pattern_fault(pattern: str, start: Path, folder: Path) -> str:
    parts = PurePosixPath(pattern.replace("\\", "/")).parts
    if pattern.startswith(("/", "~", "\\")) or ".." in parts:
        return "leads out of the repository"
    whole = Path(glob.escape(str(start))) / pattern
    for found in map(Path, glob.glob(str(whole), recursive=True)):  # noqa: PTH207
        inside = [found] if not found.is_dir() else [path for path in found.rglob("*") if not path.is_dir()]
        if found.is_dir() and found.is_symlink():
            return "leads through a linked folder"
        if any(not _readable(path, folder) for path in inside):
            return "leads out of the repository by a link"
    return ""
