"""What each verb found, kept in the checkpoint: `sparkquant/evidence/<verb>.json`, bound to the digest of the folder.

    seen = evidence.state_of(folder)
    ...measure...
    evidence.record(folder, "evaluate", result.as_json(), inputs={"source": source}, since=seen)
    for verb, found in evidence.read(folder).items():
        print(verb, found.freshness, found.outcome)

The digest covers every file that can change what is served. README.md and the evidence itself are left out, so that a
record can name the digest of the folder that it lies in, and a card can be written from the records.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from sparkquant.checkpoint import read_json
from sparkquant.errors import CheckpointError, Problem, UsageError
from sparkquant.events import Advanced, Finished, Listener, Started, ignore
from sparkquant.report import Status

FOLDER = "sparkquant/evidence"
CARD = "README.md"
PLAN = "sparkquant/plan.json"
FORMAT = 1

MAX_FILES = 100_000
CHUNK_BYTES = 8 * 2**20
PACKAGES = ("torch", "transformers", "numpy", "numba")
"""Installed versions that every record states: the ones that do the arithmetic."""

_VERB = re.compile(r"[a-z][a-z0-9-]{0,39}")


class Freshness(StrEnum):
    """`stale`: the checkpoint has changed since; `unreadable`: no record of this version of sparkquant."""

    FRESH = "fresh"
    STALE = "stale"
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Evidence:
    """One verb's record, and whether it still speaks of this checkpoint.

    outcome   pass, fail or inconclusive; None when the record cannot be read
    why       what makes it stale or unreadable
    record    the whole document; `record["result"]` is what the verb returned
    """

    verb: str
    freshness: Freshness
    outcome: Status | None
    why: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def result(self) -> Mapping[str, Any]:
        """What the verb returned."""
        found = self.record.get("result")
        return found if isinstance(found, Mapping) else {}

    @property
    def green(self) -> bool:
        """Fresh and passed."""
        return self.freshness is Freshness.FRESH and self.outcome is Status.PASS

    def __str__(self) -> str:
        told = str(self.freshness) if self.outcome is None else f"{self.freshness}, {self.outcome}"
        return f"{self.verb}: {told}" + (f" ({self.why})" if self.why else "")


def content_files(folder: str | os.PathLike[str]) -> dict[str, os.stat_result]:
    """Files that the digest covers and `publish` uploads, by relative name: all but README.md, evidence, hidden ones.

    Raises CheckpointError for what is no regular file: a pipe never ends, a linked folder may hold anything.
    """
    root = Path(folder)
    found: dict[str, os.stat_result] = {}
    odd: list[Problem] = []
    for name in _names(root):
        status = (root / name).stat() if (root / name).exists() else None
        if status is None or not stat.S_ISREG(status.st_mode):
            odd.append(Problem(name, "a linked folder, a dead link, a pipe or a device"))
        else:
            found[name] = status
        if len(found) > MAX_FILES:
            raise CheckpointError(f"{root}: more than {MAX_FILES:,} files", hint="is this a checkpoint folder?")
    if odd:
        raise CheckpointError(
            f"{root}: not all of it is regular files", hint="replace them by copies of the real files", problems=odd
        )
    return dict(sorted(found.items()))


def _names(root: Path) -> Iterator[str]:
    def unreadable(error: OSError) -> None:
        raise CheckpointError(f"{error.filename}: {error.strerror}", hint="make it readable") from None

    for place, folders, files in os.walk(root, onerror=unreadable):
        links = [name for name in folders if Path(place, name).is_symlink()]
        folders[:] = [name for name in folders if not name.startswith(".") and name not in links]
        for name in [*files, *links]:
            relative = Path(place, name).relative_to(root).as_posix()
            # A loader follows the index to hidden shards as well.
            hidden = name.startswith(".") and not name.endswith(".safetensors")
            if not hidden and relative != CARD and not relative.startswith(f"{FOLDER}/"):
                yield relative


def state_of(folder: str | os.PathLike[str]) -> dict[str, tuple[int, int]]:
    """Size and modification time of every covered file: taken before a measurement, compared by `record` after it."""
    return {name: (status.st_size, status.st_mtime_ns) for name, status in content_files(folder).items()}


def checkpoint_digest(
    folder: str | os.PathLike[str], *, known: Mapping[str, str] | None = None, listener: Listener = ignore
) -> str:
    """`xxh3-128:<hex>` over name, size and xxh3-128 of every covered file, in the order of names.

    known   digests of files that are known already: those that the writer's journal holds of its own shards

    xxh3 reads as fast as the disk; sha256 would add minutes for a large model, and protect nothing: who can exchange a
    shard can exchange the record beside it. (The hub checks its own sha256 of every uploaded file.)
    """
    import xxhash

    root, files = Path(folder), content_files(folder)
    unread = {name: status.st_size for name, status in files.items() if name not in (known or {})}
    listener(Started("digest", sum(unread.values())))
    whole = xxhash.xxh3_128()
    for name, status in files.items():
        if name in unread:
            value = file_digest(root / name)
            listener(Advanced("digest", status.st_size, name))
        else:
            value = (known or {})[name]
        whole.update(f"{name}\0{status.st_size}\0{value}\n".encode("utf-8", "surrogateescape"))
    listener(Finished("digest"))
    return f"xxh3-128:{whole.hexdigest()}"


def file_digest(path: Path) -> str:
    """xxh3-128 of one file, in hexadecimal, through one small buffer."""
    import xxhash

    hasher = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(CHUNK_BYTES))
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}", hint="make it readable") from None
    return hasher.hexdigest()


def unrecordable(folder: str | os.PathLike[str]) -> str:
    """Why no evidence can be kept in a folder; empty when it can."""
    root = Path(folder)
    if not (root / PLAN).is_file():
        return f"{root} is not a result of sparkquant"
    if root.resolve().parent.name == "snapshots":
        return f"{root} lies in the hub's cache"
    place = root / FOLDER
    if any(part.is_symlink() for part in (root / "sparkquant", place)):
        return f"{place} is a link"
    while not place.exists():
        place = place.parent
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} is not writable"


def record(
    folder: str | os.PathLike[str],
    verb: str,
    result: Mapping[str, Any],
    *,
    outcome: Status | None = None,
    inputs: Mapping[str, Any] | None = None,
    since: Mapping[str, tuple[int, int]] | None = None,
    digest: str | None = None,
    listener: Listener = ignore,
) -> Path:
    """Keep what a verb found in the checkpoint, bound to the checkpoint's digest; returns the file.

    result   plain JSON; paths of the folder, of path-like `inputs` and of the home folder are cut to their last part,
             because records are published
    outcome  by default as `outcome_of` reads it from the result
    inputs   what the numbers depend on: source, level, data, engine
    since    `state_of(folder)` before the measurement; CheckpointError when the folder is not in that state any more
    digest   `checkpoint_digest(folder)`, when the caller has just computed it

    Raises UsageError when the folder cannot hold evidence (see `unrecordable`).
    """
    root = Path(folder)
    if not _VERB.fullmatch(verb):
        raise UsageError(f"{verb!r} is no verb", hint="pass a name like evaluate")
    if reason := unrecordable(root):
        raise UsageError(f"no evidence can be kept: {reason}", hint="copy the checkpoint to a folder of your own")
    if since is not None and state_of(root) != dict(since):
        raise CheckpointError(f"{root} was changed while it was measured", hint="run the same command again")
    digest = digest or checkpoint_digest(root, listener=listener)
    document = document_of(root, verb, result, digest, outcome=outcome, inputs=inputs)
    path = root / FOLDER / f"{verb}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, document)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", hint="make the folder writable") from None
    return path


def document_of(
    folder: Path,
    verb: str,
    result: Mapping[str, Any],
    digest: str,
    *,
    outcome: Status | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a record: canonical JSON. Only `date` differs between two runs (SOURCE_DATE_EPOCH fixes it)."""
    places = [folder, *(Path(value) for value in (inputs or {}).values() if isinstance(value, str | os.PathLike))]
    fields = {
        "format": FORMAT,
        "verb": verb,
        "checkpoint": digest,
        "outcome": str(outcome or outcome_of(result)),
        "date": _now(),
        "versions": versions(),
        "inputs": _anonymous(inputs or {}, places),
        "result": _anonymous(result, places),
    }
    try:
        return json.dumps(fields, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError as error:
        raise UsageError(
            f"the result of {verb} is no plain JSON: {error}", hint="NaN is an error, not evidence"
        ) from None


def outcome_of(result: Mapping[str, Any]) -> Status:
    """Whether a result passed: by its verdict, its checks and its `ok`, the worst of them.

    A fault of the environment is no finding about the checkpoint: inconclusive.
    """
    checks = result.get("checks", ())
    states = {check.get("status") for check in checks if isinstance(check, Mapping)}
    verdict = result.get("verdict", result.get("outcome"))
    told = verdict.get("outcome") if isinstance(verdict, Mapping) else verdict
    if isinstance(told, str) and told != Status.PASS:
        passing = told in (Status.INCONCLUSIVE, Status.SKIPPED, "environment-fault")
        states.add(Status.INCONCLUSIVE if passing else Status.FAIL)
    if Status.FAIL in states:
        return Status.FAIL
    if Status.INCONCLUSIVE in states:
        return Status.INCONCLUSIVE
    return Status.FAIL if result.get("ok") is False else Status.PASS


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def versions() -> dict[str, str]:
    """Versions of sparkquant, Python and the installed packages that do the arithmetic; the machine's architecture."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from sparkquant import version

    found = {"sparkquant": version(), "python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = installed(package)
    return found


def _now() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    seconds = int(epoch) if epoch.isascii() and epoch.isdigit() and len(epoch) < 12 else time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _anonymous(value: Any, paths: list[Path]) -> Any:
    """A result without places of this machine: a published record shall not say how its author's disk is arranged."""
    if isinstance(value, Mapping):
        return {str(key): _anonymous(inner, paths) for key, inner in value.items()}
    if _is_list(value):
        return [_anonymous(inner, paths) for inner in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or "/" not in value:
        return value
    for path in sorted({spelling for p in paths for spelling in _spellings(p)}, key=len, reverse=True):
        value = value.replace(path, Path(path).name)
    return value.replace(f"{Path.home()}/", "~/")


def _spellings(path: Path) -> Iterator[str]:
    """An existing path as it was given and as the system knows it; a hub id is no path and stays whole."""
    if path.exists():
        spelled = (str(path), str(path.absolute()), str(path.resolve()))
        yield from (text for text in spelled if "/" in text and Path(text).name)


def _replace(path: Path, text: str) -> None:
    handle, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(part).chmod(0o666 & ~mask)
        Path(part).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(part).unlink()
        raise


def read(
    folder: str | os.PathLike[str], *, digest: str | None = None, listener: Listener = ignore
) -> dict[str, Evidence]:
    """All records of a checkpoint by verb, each fresh, stale or unreadable.

    digest   `checkpoint_digest(folder)` when it is known already: computing it reads the whole checkpoint
    """
    root = Path(folder)
    place = root / FOLDER
    if place.is_symlink() or not place.is_dir():
        return {}
    paths = sorted(path for path in place.iterdir() if path.suffix == ".json" and _VERB.fullmatch(path.stem))
    if paths and digest is None:
        digest = checkpoint_digest(root, listener=listener)
    return {path.stem: _read(path, digest or "") for path in paths}


def _read(path: Path, digest: str) -> Evidence:
    def unreadable(why: str) -> Evidence:
        return Evidence(path.stem, Freshness.UNREADABLE, None, why)

    if path.is_symlink():
        return unreadable("it is a link")
    try:
        found = read_json(path)
    except CheckpointError as error:
        return unreadable(error.what.removeprefix(f"{path}: "))
    if found.get("format") != FORMAT:
        return unreadable(f"its format is {found.get('format')!r}, this version reads {FORMAT}")
    if found.get("verb") != path.stem:
        return unreadable(f"it is a record of {found.get('verb')!r}")
    if found.get("outcome") not in (Status.PASS, Status.FAIL, Status.INCONCLUSIVE):
        return unreadable(f"its outcome is {found.get('outcome')!r}")
    outcome = Status(found["outcome"])
    if found.get("checkpoint") != digest:
        return Evidence(path.stem, Freshness.STALE, outcome, "the checkpoint has changed since", found)
    return Evidence(path.stem, Freshness.FRESH, outcome, "", found)
