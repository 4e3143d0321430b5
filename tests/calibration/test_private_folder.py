"""Work folders are for their owner only, survive failure, and go when the work is done."""

from __future__ import annotations

import stat
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


def test_two_runs_do_not_share_it(tmp_path: Path) -> None:
    with (
        private_folder("job", base=tmp_path),
        pytest.raises(UsageError, match="in use"),
        private_folder("job", base=tmp_path),
    ):
        pass


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
