"""`Installation`: an installed vLLM, described by its files; it is never imported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sparkquant.errors import EnvironmentMissing
from sparkquant.marlin.fatbin import Extension, read_extension
from sparkquant.marlin.noun import Noun

PACKAGES = (
    "vllm", "torch", "triton", "flashinfer-python", "flashinfer-cubin", "compressed-tensors", "transformers",
    "nvidia-cutlass-dsl", "humming-kernels", "deep-gemm", "xgrammar",
)  # fmt: skip
"""Distributions whose version decides which kernels are there."""
MAX_EXTENSIONS = 400
MAX_TEXT = 1 << 22
TIME_LIMIT = 60
FIND = (
    "import importlib.util, json, sys; s = importlib.util.find_spec('vllm');"
    "print(json.dumps({'folder': list(s.submodule_search_locations)[0] if s and s.submodule_search_locations else '',"
    "'path': sys.path}))"
)
"""Run by the interpreter that is asked: it finds the package without importing it."""


class Installation(Noun):
    """`folder` is the package's, `versions` those of `PACKAGES` that are installed beside it.

    known_variables  environment variables that this version reads, () where its table could not be read
    """

    folder: str
    version: str
    python: str
    versions: dict[str, str]
    extensions: tuple[Extension, ...]
    known_variables: tuple[str, ...]

    @property
    def cuda(self) -> tuple[Extension, ...]:
        """Extensions with GPU code, or with a section that could not be read."""
        return tuple(extension for extension in self.extensions if extension.modules or extension.problem)


def core(file: str | os.PathLike[str]) -> bool:
    """Whether an extension holds kernels of quantized layers: `_C` dense ones, `_moe_C` experts; Marlin is in both."""
    return Path(file).name.partition(".")[0].removesuffix("_stable_libtorch") in ("_C", "_moe_C")


def find_vllm(path: str | None = None) -> Installation | None:
    """The vLLM at `path`, else that of the `vllm` on PATH, else that of this Python; None where there is none.

    path  a Python interpreter, a `vllm` script, a virtual environment, a folder of packages, or the package itself
    Raises EnvironmentMissing when a path was named and no vLLM is there.
    """
    if path is not None:
        place = Path(path).expanduser()
        found = _at(place) if place.exists() else None
        if found is None:
            raise EnvironmentMissing(
                f"{path}: {'no vLLM is there' if place.exists() else 'does not exist'}",
                hint="pass a python interpreter, the `vllm` script, a virtual environment or a folder of packages",
            )
        return found
    script = shutil.which("vllm")
    if script and (found := _at(Path(script))):
        return found
    own = shutil.which("python3") or shutil.which("python")
    return _by_interpreter(Path(own)) if own else None


def _at(place: Path) -> Installation | None:
    if place.is_file():
        interpreter = _shebang(place) or place
        return _by_interpreter(interpreter) if os.access(interpreter, os.X_OK) else None
    for package in (place, place / "vllm"):
        if (package / "__init__.py").is_file() and package.name == "vllm":
            return _describe(package, "", [str(package.parent)])
    for interpreter in (place / "bin" / "python", place / "bin" / "python3"):
        if interpreter.is_file():
            return _by_interpreter(interpreter)
    return None


def _shebang(script: Path) -> Path | None:
    """The interpreter of a script; None for a binary."""
    with script.open("rb") as file:
        first = file.readline(4096)
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    if words and Path(words[0]).name == "env" and len(words) > 1:
        found = shutil.which(words[1])
        return Path(found) if found else None
    return Path(words[0]) if words else None


def _by_interpreter(python: Path) -> Installation | None:
    try:
        done = subprocess.run(
            [str(python), "-c", FIND], capture_output=True, text=True, timeout=TIME_LIMIT, check=False, cwd="/",
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        told = json.loads(done.stdout)
        folder, path = Path(told["folder"] or "."), [entry for entry in told["path"] if entry]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return None
    return _describe(folder, str(python), path) if told["folder"] else None


def _describe(folder: Path, python: str, path: list[str]) -> Installation:
    versions = dict(_versions(path))
    return Installation(
        folder=str(folder), version=versions.get("vllm") or _own_version(folder), python=python, versions=versions,
        extensions=tuple(read_extension(file, names=core(file)) for file in _libraries(folder)),
        known_variables=tuple(_variables(folder)),
    )  # fmt: skip


def _versions(path: list[str]) -> Iterator[tuple[str, str]]:
    """Versions by the names of `*.dist-info` folders; the first on the path counts."""
    wanted = {re.sub(r"[-_.]+", "_", name).lower(): name for name in PACKAGES}
    seen: set[str] = set()
    for entry in path:
        folder = Path(entry)
        if not folder.is_dir():
            continue
        for info in sorted(folder.glob("*.dist-info")):
            name, _, version = info.name.removesuffix(".dist-info").partition("-")
            known = wanted.get(re.sub(r"[-_.]+", "_", name).lower())
            if known and known not in seen:
                seen.add(known)
                yield known, version


def _own_version(folder: Path) -> str:
    """What the package says itself, where no metadata lies beside it (an unpacked or editable tree)."""
    found = re.search(r"^__version__ = version = ['\"]([^'\"]{1,60})", _text(folder / "_version.py"), re.MULTILINE)
    return found[1] if found else ""


def _libraries(folder: Path) -> Iterator[Path]:
    """The shared libraries below a package, in a stable order."""
    found = 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".so") and found < MAX_EXTENSIONS:
                found += 1
                yield Path(parent, name)


def _variables(folder: Path) -> Iterator[str]:
    """The keys of `environment_variables` in envs.py, read as text."""
    yield from sorted(set(re.findall(r"^    \"(VLLM_\w{1,100})\":(?: |$)", _text(folder / "envs.py"), re.MULTILINE)))


def _text(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(MAX_TEXT)
    except OSError:
        return ""
