"""Kill a real `quantize` at its n-th change of the disk, look at what it left, and run it again.

    python -m tests.execution.kills SOURCE FOLDER STEP FIRST

Every STEP-th change from FIRST on is tried. Prints one JSON object; `faults` is empty when every kill left nothing
half-made and the second run gave the bytes of an undisturbed one without writing a finished shard again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.execution.folders import digests

RECIPE = "qwen-hybrid-w4a16-fp8"
SHARD_BYTES = 300_000
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile"}
CALLS = ("pwrite", "copy_file_range", "fsync", "fdatasync")


def quantize(source: Path, out: Path) -> None:
    """The job under test."""
    import sparkquant

    sparkquant.quantize(source, RECIPE, out, method="rtn", shard_bytes=SHARD_BYTES)


def die_at(number: int, prefix: str) -> None:
    """From now on the process kills itself just before its change `number` of anything that starts with `prefix`."""
    left = number

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if str(path).startswith(prefix) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                count()
        elif event in CHANGES and str(arguments[0]).startswith(prefix):
            count()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            count()
            return call(*arguments)

        return counting

    sys.addaudithook(audit)
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def in_a_fork(work: Callable[[], None], *, kill_after_s: float | None = None) -> int:
    """Exit status of a forked process that runs `work`; -9 when it was killed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def finished_shards(out: Path) -> dict[str, tuple[int, int]]:
    """inode and modification time of the shards that the journal calls finished."""
    journal = out.with_name(out.name + ".partial.journal")
    lines = journal.read_text().splitlines() if journal.exists() else []
    staged = out.with_name(out.name + ".partial")
    found = {}
    for line in lines:
        entry = json.loads(line)
        if "shard" in entry and (staged / entry["shard"]).exists():
            stat = (staged / entry["shard"]).stat()
            found[entry["shard"]] = (stat.st_ino, stat.st_mtime_ns)
    return found


def faults_after_a_kill(out: Path, expected: dict[str, str]) -> list[str]:
    """What is wrong with what a killed run left."""
    staged = out.with_name(out.name + ".partial")
    faults = []
    if out.exists() and digests(out) != expected:
        faults.append("a half folder was published")
    left = digests(staged) if staged.exists() else {}
    shards = {name for name in expected if name.endswith(".safetensors")}
    if "config.json" in left and any(left.get(name) != expected[name] for name in shards):
        faults.append("config.json was there before the weights")
    faults += [f"{name}: in the journal but not whole" for name in finished_shards(out) if left[name] != expected[name]]
    return faults


def faults_after_the_next_run(source: Path, out: Path, expected: dict[str, str]) -> list[str]:
    """Run the job again, undisturbed."""
    if out.exists():
        return []
    finished = finished_shards(out)
    if in_a_fork(lambda: quantize(source, out)) != 0:
        return ["the second run failed"]
    faults = [] if digests(out) == expected else ["the second run gave other bytes"]
    for name, before in finished.items():
        stat = (out / name).stat()
        if (stat.st_ino, stat.st_mtime_ns) != before:
            faults.append(f"{name} was finished and written again")
    if sorted(entry.name for entry in out.parent.iterdir()) != [out.name]:
        faults.append("something is left beside the output")
    return faults


def at_every_change(source: Path, folder: Path, expected: dict[str, str], step: int, first: int) -> dict[str, Any]:
    """Kill at change `first`, `first + step`, ... until a run gets through."""
    faults: list[str] = []
    kills = resumed = 0
    for number in range(first, 10_000, step):
        out = folder / f"{number}" / "out"
        out.parent.mkdir()

        def disturbed(number: int = number, out: Path = out) -> None:
            die_at(number, str(out))
            quantize(source, out)

        status = in_a_fork(disturbed)
        if status == 0:
            break
        kills += 1
        found = [f"status {status}"] if status != -signal.SIGKILL else faults_after_a_kill(out, expected)
        resumed += bool(finished_shards(out))
        found += faults_after_the_next_run(source, out, expected)
        faults += [f"change {number}: {fault}" for fault in found]
        shutil.rmtree(out.parent)
    return {"kills": kills, "resumed": resumed, "faults": faults}


def at_random_times(source: Path, folder: Path, expected: dict[str, str], longest_s: float) -> dict[str, Any]:
    """Kill one and the same job again and again at random times, then let it finish."""
    out = folder / "random" / "out"
    out.parent.mkdir()
    choose = random.Random(0)
    faults: list[str] = []
    for attempt in range(25):
        in_a_fork(lambda: quantize(source, out), kill_after_s=choose.uniform(0, longest_s))
        faults += [f"attempt {attempt}: {fault}" for fault in faults_after_a_kill(out, expected)]
        if out.exists():
            shutil.rmtree(out)
    return {"kills": 25, "faults": faults + faults_after_the_next_run(source, out, expected)}


def main(source: str, folder: str, step: str, first: str) -> None:
    """See the module."""
    import torch

    import sparkquant

    torch.set_num_threads(1)
    assert sparkquant.quantize
    reference = Path(folder) / "reference"
    start = time.monotonic()
    assert in_a_fork(lambda: quantize(Path(source), reference)) == 0
    seconds = time.monotonic() - start
    expected = digests(reference)
    if step == "random":
        found = at_random_times(Path(source), Path(folder), expected, 1.2 * seconds)
    else:
        found = at_every_change(Path(source), Path(folder), expected, int(step), int(first))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
