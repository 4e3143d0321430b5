"""Which process holds a file lock: Linux lists every lock by the file's inode."""

from __future__ import annotations

import os
from pathlib import Path

LOCKS = Path("/proc/locks")


def lock_holder(file: int) -> str:
    """`process 1234` that holds a flock of an open file; `another process` where the system does not tell.

    A holder outside of this container, or on another machine of a shared file system, has no number here.
    """
    found = os.fstat(file)
    wanted = (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)
    try:
        lines = LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return "another process"
    for line in lines:
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK":  # those that wait have an arrow in second place
            continue
        major, minor, inode = fields[5].split(":")
        if (int(major, 16), int(minor, 16), int(inode)) == wanted and int(fields[4]) > 0:
            return f"process {fields[4]}"
    return "another process"
