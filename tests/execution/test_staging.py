"""The staging folder: one process, one job, one rename; whatever stops it, no half folder and nothing done twice."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkquant import writer as module
from sparkquant.errors import PlanViolation, Resumable, UsageError
from sparkquant.schemes import OutputTensor
from sparkquant.writer import StagedCheckpoint
from tests.execution.folders import digests

JOB = {"plan": "aaaa", "source": {"model.safetensors": [10, 20]}}
SMALL = [OutputTensor("a", "F32", (2, 3)), OutputTensor("b", "I64", (1,))]


def _fill(staged: StagedCheckpoint, name: str = "model.safetensors") -> None:
    with staged.shard(name, SMALL) as writer:
        writer.put("b", "I64", (1,), memoryview(bytes(8)))
        writer.put("a", "F32", (2, 3), memoryview(bytes(range(24))))


def test_a_shard_that_failed_does_not_count(tmp_path: Path) -> None:
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        with pytest.raises(PlanViolation), staged.shard("model.safetensors", SMALL):
            pass
        assert not staged.finished
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        assert not staged.finished
        assert list(staged.path.iterdir()) == []


def test_publishing_is_one_rename(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "er" / "out"
    with StagedCheckpoint(out, JOB) as staged:
        _fill(staged)
        staged.write_text("sparkquant/plan.json", "{}\n")
        assert not out.exists()
        assert staged.publish() == out
    assert sorted(digests(out)) == ["model.safetensors", "sparkquant/plan.json"]
    assert list(out.parent.iterdir()) == [out]


def test_everything_is_on_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recording(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def renaming(self: Path, target: Path) -> Path:
        synced.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recording)
    monkeypatch.setattr(Path, "rename", renaming)
    (tmp_path / "vocab.txt").write_text("a\n")
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        _fill(staged)
        staged.write_index({"model.safetensors": SMALL, "other": SMALL[:0]})
        staged.copy_file("extra/vocab.txt", tmp_path / "vocab.txt")
        staged.write_text("config.json", "{}\n")
        files = [str(path) for path in staged.path.rglob("*")]
        staged.publish()
    at = synced.index("rename")
    assert set(files) | {str(staged.path)} <= set(synced[:at])
    assert str(tmp_path) in synced[at:]


@pytest.mark.parametrize("kind", ["folder", "full folder", "file", "dangling link", "link"])
def test_an_existing_output_is_never_touched(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if "folder" in kind:
        out.mkdir()
    if kind == "full folder":
        (out / "mine").write_text("precious")
    if kind == "file":
        out.write_text("precious")
    if "link" in kind:
        out.symlink_to(tmp_path / "nowhere" if kind == "dangling link" else tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"out exists already\nhint: ") as caught, StagedCheckpoint(out, JOB):
        pass
    assert caught.value.exit_code == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        _fill(staged)
        (tmp_path / "out").mkdir()
        with pytest.raises(UsageError, match="exists already"):
            staged.publish()
    assert (staged.path / "model.safetensors").exists()


def test_a_folder_that_is_not_ours_is_not_cleared(tmp_path: Path) -> None:
    mine = tmp_path / "out.partial" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("precious")
    for restart in (False, True):
        with pytest.raises(UsageError, match="no journal beside it says that it is ours"):
            StagedCheckpoint(tmp_path / "out", JOB, restart=restart).__enter__()
    assert mine.read_text() == "precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.partial"]


def test_a_linked_staging_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.txt").write_text("precious")
    (tmp_path / "out.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"out\.partial is a link"):
        StagedCheckpoint(tmp_path / "out", JOB, restart=True).__enter__()
    assert (tmp_path / "elsewhere" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("name", ["file/out", "x" * 300, "proc"])
def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    out = Path("/proc/no/such") if name == "proc" else tmp_path / name
    with pytest.raises(UsageError, match="hint: choose another output folder"):
        StagedCheckpoint(out, JOB).__enter__()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_parent_without_permission_is_a_usage_error(tmp_path: Path) -> None:
    parent = tmp_path / "locked"
    parent.mkdir(mode=0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        StagedCheckpoint(parent / "out", JOB).__enter__()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    child = (
        "import sys; from pathlib import Path; from sparkquant.writer import StagedCheckpoint\n"
        "from sparkquant.errors import UsageError\n"
        "try:\n    StagedCheckpoint(Path(sys.argv[1]), {}).__enter__()\n"
        "except UsageError as error:\n    print(error)\n"
    )
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        _fill(staged)
        before = digests(tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", child, str(tmp_path / "out")], capture_output=True, text=True, check=True
        )
        assert f"is in use by process {os.getpid()}" in done.stdout
        with pytest.raises(UsageError, match="in use"):
            StagedCheckpoint(tmp_path / "out", JOB, restart=True).__enter__()
        assert digests(tmp_path) == before
        staged.publish()


def test_the_lock_of_a_finished_job_is_worth_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opens the journal just before its owner publishes must not go on in a folder that is gone."""
    first, second = (StagedCheckpoint(tmp_path / "out", JOB) for _ in range(2))
    lock = fcntl.flock

    def late(file: Any, flags: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.publish()
        first.__exit__(None, None, None)
        lock(file, flags)

    first.__enter__()
    _fill(first)
    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UsageError, match="exists already"):
        second.__enter__()
    assert sorted(digests(tmp_path)) == ["out/model.safetensors"]


# The journal


def _interrupted(tmp_path: Path) -> StagedCheckpoint:
    staged = StagedCheckpoint(tmp_path / "out", JOB)
    with staged:
        _fill(staged, "one.safetensors")
        _fill(staged, "two.safetensors")
        staged.write_text("config.json", "{}")
    return staged


def _journal(tmp_path: Path) -> Path:
    return tmp_path / "out.partial.journal"


def test_finished_shards_are_taken_up_and_the_rest_is_cleared(tmp_path: Path) -> None:
    staged = _interrupted(tmp_path)
    (staged.path / "three.safetensors").write_bytes(b"half")
    (staged.path / "sparkquant").mkdir()
    with StagedCheckpoint(tmp_path / "out", JOB) as again:
        assert again.finished == {"one.safetensors", "two.safetensors"}
        assert sorted(entry.name for entry in again.path.iterdir()) == ["one.safetensors", "two.safetensors"]


@pytest.mark.parametrize(
    "tail", [b'{"shard": "thr', b'{"shard": "three.safetensors"}', b"\x00" * 40, b"\xff\xfe", b"7\n"]
)
def test_a_torn_last_line_costs_nothing_but_itself(tmp_path: Path, tail: bytes) -> None:
    _interrupted(tmp_path)
    with _journal(tmp_path).open("ab") as file:
        file.write(tail)
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        assert staged.finished == {"one.safetensors", "two.safetensors"}
        _fill(staged, "three.safetensors")
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        assert staged.finished == {"one.safetensors", "two.safetensors", "three.safetensors"}


def test_every_cut_of_the_journal_is_survived(tmp_path: Path) -> None:
    folder = _interrupted(tmp_path).path
    shard = (folder / "one.safetensors").read_bytes()
    journal = _journal(tmp_path).read_bytes()
    job, one, two = (journal.index(line) + len(line) for line in journal.splitlines())
    for length in range(len(journal)):
        for name in ("one.safetensors", "two.safetensors"):
            (folder / name).write_bytes(shard)
        _journal(tmp_path).write_bytes(journal[:length])
        staged = StagedCheckpoint(tmp_path / "out", JOB)
        if length < job:
            with pytest.raises(UsageError, match="no journal"):
                staged.__enter__()
            continue
        with staged:
            whole = {"one.safetensors": one, "two.safetensors": two}
            assert staged.finished == {name for name, end in whole.items() if end <= length}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "grow"])
def test_a_damaged_shard_is_done_again(tmp_path: Path, damage: str) -> None:
    shard = _interrupted(tmp_path).path / "one.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    changed = {"flip": bytes(data), "truncate": bytes(data[:-8]), "grow": bytes(data) + b"0"}
    if damage == "remove":
        shard.unlink()
    else:
        shard.write_bytes(changed[damage])
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        assert staged.finished == {"two.safetensors"}
        assert not shard.exists()
        _fill(staged, "one.safetensors")
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        assert staged.finished == {"one.safetensors", "two.safetensors"}


def test_a_journal_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    (tmp_path / "mine").write_bytes(b"x")
    with _journal(tmp_path).open("a") as file:
        file.write(json.dumps({"shard": "../mine", "digest": module._digest(tmp_path / "mine")}) + "\n")
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        assert staged.finished == {"one.safetensors", "two.safetensors"}
    assert (tmp_path / "mine").exists()


def test_another_job_is_refused_with_old_and_new(tmp_path: Path) -> None:
    staged = _interrupted(tmp_path)
    before = digests(tmp_path)
    other = {"plan": "bbbb", "source": JOB["source"], "overlay": "cccc"}
    with pytest.raises(UsageError) as caught:
        StagedCheckpoint(tmp_path / "out", other).__enter__()
    text = str(caught.value)
    assert "out.partial belongs to another job" in text
    assert "plan: was aaaa, is bbbb" in text
    assert "overlay: was null, is cccc" in text
    assert "source" not in text
    assert "--restart" in text
    assert digests(tmp_path) == before
    with StagedCheckpoint(tmp_path / "out", other, restart=True) as again:
        assert again.finished == frozenset()
        assert list(again.path.iterdir()) == []
        _fill(again, "one.safetensors")
    assert staged.path == again.path
    with StagedCheckpoint(tmp_path / "out", other) as again:
        assert again.finished == {"one.safetensors"}


def test_restart_discards_the_same_job_too(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    with StagedCheckpoint(tmp_path / "out", JOB, restart=True) as staged:
        assert staged.finished == frozenset()


def test_a_journal_without_its_folder_is_void(tmp_path: Path) -> None:
    _journal(tmp_path).write_text('{"job": {"plan": "other"}}\n{"shard": "one.safetensors", "digest": "0"}\n')
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        assert staged.finished == frozenset()
    assert json.loads(_journal(tmp_path).read_text()) == {"job": JOB}


# A disk that is too small


def test_too_little_space_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    with StagedCheckpoint(tmp_path / "out", JOB) as staged, pytest.raises(Resumable) as caught:
        staged.require_space(2**62)
    assert caught.value.exit_code == 6
    assert "needed" in str(caught.value)
    assert "then run the same command" in caught.value.hint


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_disk_that_fills_up_is_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    _interrupted(tmp_path)
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        for call in ("pwrite", "fsync"):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, full)
                with pytest.raises(Resumable, match="run the same command"):
                    _fill(staged, "three.safetensors")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(Resumable):
                staged.write_text("config.json", "{}")
    with StagedCheckpoint(tmp_path / "out", JOB) as staged:
        assert staged.finished == {"one.safetensors", "two.safetensors"}


def test_a_file_size_limit_is_resumable(tmp_path: Path) -> None:
    child = (
        "import resource, sys; from pathlib import Path\n"
        "from sparkquant.errors import Resumable\n"
        "from sparkquant.schemes import OutputTensor\n"
        "from sparkquant.writer import StagedCheckpoint\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    with StagedCheckpoint(Path(sys.argv[1]), {}) as staged:\n"
        "        with staged.shard('model.safetensors', [OutputTensor('a', 'U8', (1 << 21,))]):\n"
        "            pass\n"
        "except Resumable as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", child, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert "File too large" in done.stdout
    assert not done.stderr
    assert not (tmp_path / "out").exists()
