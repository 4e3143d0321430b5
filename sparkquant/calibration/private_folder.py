"""Work folders for what must not be published: calibration text, token ids, activations."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sparkquant.errors import UsageError
from sparkquant.lock_holder import lock_holder

LOCK = ".lock"


def private_base() -> Path:
    """$XDG_CACHE_HOME/sparkquant, or ~/.cache/sparkquant."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "sparkquant"


@contextmanager
def private_folder(
    key: str, *, base: str | os.PathLike[str] | None = None, outside: str | os.PathLike[str] | None = None
) -> Iterator[Path]:
    """A folder of mode 0700 named `key` under `base`, deleted when the block succeeds.

    It survives an exception, Ctrl-C and a killed process, so that the same `key` (a digest of the job) finds its work
    again. UsageError when another run holds it, when it belongs to someone else, or when it would lie inside `outside`,
    the output folder.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", key):
        raise UsageError(f"{key!r} is no name for a work folder", hint="use letters, digits, dot, dash, underscore")
    parent = Path(base).expanduser().absolute() if base is not None else private_base()
    folder = parent / key
    if outside is not None and folder.resolve().is_relative_to(Path(outside).expanduser().resolve()):
        raise UsageError(
            f"{folder} would lie inside the output folder", hint="calibration text must not be published: pick another"
        )
    with _locked(folder):
        yield folder
        _remove(folder)


def _make_private(folder: Path) -> None:
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise UsageError(f"{folder} is not a folder of your own", hint="remove it, or pick another base")
        folder.chmod(0o700)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}", hint="pick a base that you can write to") from None


def _remove(folder: Path) -> None:
    """The lock goes last: who opens it meanwhile finds an empty folder, which is then theirs."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    (folder / LOCK).unlink()
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = _lock(folder)
    try:
        yield
    finally:
        os.close(handle)


def _lock(folder: Path) -> int:
    """An open file that is locked, in a folder that is still there: its last owner may have finished and removed it."""
    while True:
        _make_private(folder)
        path = folder / LOCK
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}", hint="remove it, or pick another base") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(handle)):
                return handle
        except BlockingIOError:
            holder = lock_holder(handle)
            os.close(handle)
            raise UsageError(
                f"{folder} is in use by {holder}, which does the same job", hint="wait for it, or stop it"
            ) from None
        os.close(handle)
