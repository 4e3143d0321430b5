"""Work folders are for their owner only, survive failure, and go when the work is done."""

from __future__ import annotations

import fcntl
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from sparkquant.calibration import private_base, private_folder
from sparkquant.errors import UsageError


def test_it_is_private_and_goes_on_success(tmp_path: Path) -> None:
    with private_folder("job", base=tmp_path) as folder:
        assert folder == tmp_path / "job"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "rows.json").write_text("[]")
        (folder / "deep").mkdir()
    assert not folder.exists()


def fail_in(base: Path) -> None:
    with private_folder("job", base=base) as folder:
        (folder / "rows.json").write_text("[1]")
        raise KeyboardInterrupt


def test_it_survives_failure_for_the_next_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fail_in(tmp_path)
    (tmp_path / "job").chmod(0o755)
    with private_folder("job", base=tmp_path) as folder:
        assert (folder / "rows.json").read_text() == "[1]"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_cache_folder_of_the_system_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with private_folder("job") as folder:
        assert folder == tmp_path / "sparkquant" / "job"
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert private_base() == Path.home() / ".cache" / "sparkquant"


HOLD = """
import sys
from pathlib import Path
from sparkquant.calibration import private_folder
with private_folder("job", base=sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_two_runs_do_not_share_it(tmp_path: Path) -> None:
    line = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(UsageError, match=f"in use by process {other.pid}, which does the same job"),
            private_folder("job", base=tmp_path),
        ):
            pass
        other.communicate("go\n")
    assert other.returncode == 0
    with private_folder("job", base=tmp_path) as folder:
        assert folder.is_dir()


def test_where_locks_are_not_listed_the_other_has_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkquant.lock_holder.LOCKS", tmp_path / "absent")
    with (
        private_folder("job", base=tmp_path),
        pytest.raises(UsageError, match="in use by another process"),
        private_folder("job", base=tmp_path),
    ):
        pass


def test_a_folder_that_its_owner_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a finished job is worth nothing: its file is gone."""
    first = ExitStack()
    first.enter_context(private_folder("job", base=tmp_path))
    lock = fcntl.flock

    def late(file: int, flags: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.close()
        lock(file, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    with private_folder("job", base=tmp_path) as folder:
        assert (folder / ".lock").exists()
    assert not folder.exists()


def test_it_stays_outside_the_output_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="inside the output folder"),
        private_folder("job", base=tmp_path / "out" / "work", outside=tmp_path / "out"),
    ):
        pass


@pytest.mark.parametrize("key", ["", "..", "a/b", ".hidden", "x" * 200])
def test_keys_are_plain_names(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError, match="no name"), private_folder(key, base=tmp_path):
        pass


def test_links_and_files_in_its_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError), private_folder("job", base=tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError), private_folder("file", base=tmp_path):
        pass
