"""A process between us and a server: whatever becomes of us, the server and everything it started end.

    python -I keeper.py GRACE COMMAND...        (run by its path, with the standard library alone)

It ends the server when the server's command ends, when its standard input is closed (we stopped it, or we died, however
that happened), or when it gets SIGTERM. As a subreaper it inherits what the server's children leave behind, also in
sessions of their own: those are found through /proc and killed too. Exit code: the server's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL = 0.05


def main(grace: float, command: list[str]) -> int:
    """Run `command` until it ends or has to."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wanted: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: wanted.append(received))
    child = _start(libc, command)
    code: int | None = None
    while code is None and not wanted and not _closed():
        code = _reaped(child)
    if code is None:
        code = _end(child, grace)
    _clear()
    return code if code >= 0 else 128 - code


def _start(libc: ctypes.CDLL, command: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _closed() -> bool:
    """Whether whoever started us is gone. Nothing is ever written to the pipe."""
    ready, _, _ = select.select([0], [], [], POLL)
    return bool(ready) and not os.read(0, 64)


def _reaped(child: int) -> int | None:
    """The exit code of the server's command, None while it runs. Orphans that ended are reaped on the way."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return os.waitstatus_to_exitcode(status)
            if pid == 0:
                return None
    return 0


def _end(child: int, grace: float) -> int:
    """SIGTERM to the server's group, and after `grace` seconds SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGTERM)
    until = time.monotonic() + grace
    while time.monotonic() < until:
        code = _reaped(child)
        if code is not None:
            return code
        time.sleep(POLL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    while (code := _reaped(child)) is None:
        time.sleep(POLL)
    return code


def _clear() -> None:
    """Kill what is left below us until nothing is."""
    until = time.monotonic() + 30
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL)


def descendants(root: int) -> list[int]:
    """All processes below one, as /proc shows them; those that ended and wait to be reaped count."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                # The name in parentheses may hold anything, a closing parenthesis too.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        grown = bool(more)
        found |= more
    return sorted(found - {root})


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
