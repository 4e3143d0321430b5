"""A job that was stopped, by a kill, a signal or a full disk, goes on where it stopped; another job never does."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparkquant
from sparkquant import events
from sparkquant.errors import CheckpointError, Resumable, UsageError
from tests.execution.folders import digests
from tests.execution.runs import Checkpoints, in_a_child

RECIPE = "qwen-hybrid-w4a16-fp8"
SHARD_BYTES = 300_000
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A small checkpoint that tests may change."""
    return Path(shutil.copytree(checkpoints("qwen3_5_text", layers=1), tmp_path / "source"))


def _quantize(source: Path, out: Path, **options: Any) -> dict[str, str]:
    recipe = options.pop("recipe", RECIPE)
    done = sparkquant.quantize(source, recipe, out, **{"method": "rtn", "shard_bytes": SHARD_BYTES, **options})
    return digests(done.out)


class _StopAfter:
    """A listener that interrupts the run at its n-th piece of progress."""

    def __init__(self, count: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self._left, self._error = count, error

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Advanced):
            self._left -= 1
            if self._left == 0:
                raise self._error


def _stop(source: Path, out: Path, count: int = 12, **options: Any) -> list[str]:
    """Interrupt a job, and return the names of its finished shards."""
    with pytest.raises(KeyboardInterrupt):
        _quantize(source, out, listener=_StopAfter(count), **options)
    assert not out.exists()
    journal = out.with_name(out.name + ".partial.journal").read_text()
    return [entry["shard"] for entry in map(json.loads, journal.splitlines()) if "shard" in entry]


# Killed


def _kill(source: Path, folder: Path, step: object, first: int = 1) -> dict[str, Any]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.execution.kills", source, folder, str(step), str(first)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_kill_at_any_change_of_the_disk_costs_nothing_that_was_finished(source: Path, tmp_path: Path) -> None:
    found = _kill(source, tmp_path / "kills", 30, first=5)
    assert found["faults"] == []
    assert found["kills"] > 3
    assert found["resumed"] > 1


@pytest.mark.slow
def test_a_kill_at_every_change_of_the_disk_costs_nothing_that_was_finished(source: Path, tmp_path: Path) -> None:
    found = _kill(source, tmp_path / "kills", 1)
    assert found["faults"] == []
    assert found["kills"] > 120


@pytest.mark.slow
def test_a_job_that_is_killed_again_and_again_gets_through(source: Path, tmp_path: Path) -> None:
    assert _kill(source, tmp_path / "kills", "random")["faults"] == []


# Interrupted


def test_an_interrupted_job_goes_on(source: Path, tmp_path: Path) -> None:
    expected = _quantize(source, tmp_path / "whole")
    out = tmp_path / "out"
    finished = _stop(source, out)
    assert len(finished) > 1
    with pytest.raises(CheckpointError):
        sparkquant.verify(tmp_path / "out.partial")
    before = {name: (tmp_path / "out.partial" / name).stat() for name in finished}
    seen: list[events.Event] = []
    assert _quantize(source, out, listener=seen.append) == expected
    for name, stat in before.items():
        after = (out / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    shards = len(json.loads((out / "sparkquant" / "plan.json").read_text())["shards"])
    assert events.Said(f"resuming: {len(finished)} of {shards} shards are done already") in seen
    started = next(e for e in seen if isinstance(e, events.Started) and e.phase == "quantize")
    advanced = [e for e in seen if isinstance(e, events.Advanced) and e.phase == "quantize"]
    assert sum(event.bytes for event in advanced) == started.total_bytes


def test_every_stop_and_every_kind_of_stop_is_resumable(source: Path, tmp_path: Path) -> None:
    expected = _quantize(source, tmp_path / "whole")
    for number, error in enumerate((KeyboardInterrupt, MemoryError, OSError, SystemExit)):
        out = tmp_path / f"out {number}"
        for count in (1, 9, 14):
            with pytest.raises(error):
                _quantize(source, out, listener=_StopAfter(count, error))
            assert not out.exists()
        assert _quantize(source, out) == expected


@pytest.mark.parametrize("damage", ["a bit", "the end", "all of it"])
def test_a_finished_shard_that_was_damaged_is_written_again(damage: str, source: Path, tmp_path: Path) -> None:
    expected = _quantize(source, tmp_path / "whole")
    finished = _stop(source, tmp_path / "out")
    victim = tmp_path / "out.partial" / finished[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    if damage == "all of it":
        victim.unlink()
    else:
        victim.write_bytes(bytes(data) if damage == "a bit" else bytes(data[:-1]))
    seen: list[events.Event] = []
    assert _quantize(source, tmp_path / "out", listener=seen.append) == expected
    assert any(isinstance(e, events.Said) and f"resuming: {len(finished) - 1} of" in e.message for e in seen)


# Another job


def _touch(source: Path) -> None:
    os.utime(next(source.glob("*.safetensors")), ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "options", "what"),
    [
        (_touch, {}, "source: was "),
        (None, {"method": "mse"}, "plan: was "),
        (None, {"shard_bytes": 400_000}, "plan: was "),
        (None, {"method": "mse"}, "method: was rtn, is mse"),
        (None, {"recipe": "qwen-hybrid-fp8"}, "recipe: was qwen-hybrid-w4a16-fp8, is qwen-hybrid-fp8"),
        (None, {"shard_bytes": 400_000}, "bytes, is "),
    ],
)
def test_another_job_is_refused_unless_it_may_start_over(
    change: Any, options: dict[str, Any], what: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    _stop(source, out)
    if change:
        change(source)
    left = digests(tmp_path)
    with pytest.raises(UsageError, match=r"out\.partial belongs to another job") as caught:
        _quantize(source, out, **options)
    assert what in str(caught.value)
    assert "--restart" in caught.value.hint
    assert digests(tmp_path) == left
    whole = _quantize(source, tmp_path / "whole", **options)
    assert _quantize(source, out, restart=True, **options) == whole


def test_another_version_is_another_job(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stop(source, tmp_path / "out")
    monkeypatch.setattr("sparkquant.execute.version", lambda: "99.0")
    with pytest.raises(UsageError, match=r"sparkquant: was .*, is 99\.0"):
        _quantize(source, tmp_path / "out")


# A disk that is too small


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 68 MiB, four more than the margin that must be free."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=68m", "tmpfs", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted: {done.stderr.decode()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("blocks", [0, 400_000, 900_000])
def test_a_disk_that_fills_up_stops_the_job_until_there_is_space(
    blocks: int, source: Path, small_disk: Path, tmp_path: Path
) -> None:
    expected = _quantize(source, tmp_path / "whole")
    ballast = small_disk / "ballast"

    def fill(event: events.Event) -> None:
        if isinstance(event, events.Started) and event.phase == "quantize":
            free = shutil.disk_usage(small_disk).free
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free - blocks)

    out = small_disk / "out"
    with pytest.raises(Resumable, match="No space left on device") as caught:
        _quantize(source, out, listener=fill)
    assert caught.value.exit_code == 6
    assert not out.exists()
    with pytest.raises(Resumable, match=r"bytes free, .* needed"):
        _quantize(source, out)
    ballast.unlink()
    assert _quantize(source, out) == expected


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(
    source: Path, small_disk: Path, tmp_path: Path
) -> None:
    with (small_disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 10 * 2**20)
    with pytest.raises(Resumable, match=r"bytes free, .* needed"):
        _quantize(source, small_disk / "out")
    assert [path.name for path in small_disk.iterdir()] == ["ballast"], "a refusal leaves nothing behind"


def test_a_file_size_limit_stops_the_job_until_it_is_lifted(source: Path, tmp_path: Path) -> None:
    code = (
        "import resource, sys, sparkquant\n"
        "quantize = sparkquant.quantize\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)\n"
        "try:\n    quantize(*sys.argv[2:4], sys.argv[4], method='rtn', shard_bytes=int(sys.argv[5]))\n"
        "except sparkquant.SparkquantError as error:\n    print(type(error).__name__, error)\n"
    )
    expected = _quantize(source, tmp_path / "whole")
    done = in_a_child(code, 200_000, source, RECIPE, tmp_path / "out", SHARD_BYTES, SPARKQUANT_NUMBA="0")
    assert done.stdout.startswith("Resumable ")
    assert os.strerror(errno.EFBIG) in done.stdout
    assert not (tmp_path / "out").exists()
    assert _quantize(source, tmp_path / "out") == expected
