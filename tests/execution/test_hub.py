"""Sources from the hub: a cache made by hand, never the network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import sparkquant
from sparkquant.errors import CheckpointError
from tests.execution.folders import digests
from tests.execution.runs import Checkpoints, in_a_child, source_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A hub cache that holds `owner/model`: blobs, a snapshot of links to them, and the branch."""
    home = tmp_path / "hub" / "models--owner--model"
    snapshot = home / "snapshots" / COMMIT
    (home / "blobs").mkdir(parents=True)
    (home / "refs").mkdir()
    snapshot.mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    for path in source_of("vision", checkpoints).iterdir():
        blob = home / "blobs" / f"blob-of-{path.name}"
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return tmp_path / "hub"


def test_a_snapshot_of_the_cache_gives_what_the_folder_gives(
    cache: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    plain = sparkquant.quantize(source_of("vision", checkpoints), out=tmp_path / "plain", method="rtn")
    snapshot = cache / "models--owner--model" / "snapshots" / COMMIT
    linked = sparkquant.quantize(snapshot, out=tmp_path / "linked", method="rtn")
    assert digests(linked.out) == digests(plain.out)
    assert not any(path.is_symlink() for path in linked.out.rglob("*"))


@pytest.mark.parametrize("where", ["another model of the cache", "beside the blobs"])
def test_a_link_out_of_its_own_blobs_is_refused(cache: Path, where: str, tmp_path: Path) -> None:
    other = cache / "models--owner--other" / "blobs" if where.startswith("another") else cache / "models--owner--model"
    other.mkdir(parents=True, exist_ok=True)
    (other / "secret").write_text("secret")
    snapshot = cache / "models--owner--model" / "snapshots" / COMMIT
    (snapshot / "notes.txt").symlink_to(other / "secret")
    with pytest.raises(CheckpointError, match=r"notes\.txt is a link that leaves the checkpoint"):
        sparkquant.quantize(snapshot, out=tmp_path / "out", method="rtn")
    assert not (tmp_path / "out.partial").exists()


def test_a_hub_id_in_the_cache_works_offline(cache: Path, checkpoints: Checkpoints, tmp_path: Path) -> None:
    code = "import sys, sparkquant; sparkquant.quantize('owner/model', out=sys.argv[1], method='rtn')"
    in_a_child(code, tmp_path / "by id", HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(cache))
    plain = sparkquant.quantize(source_of("vision", checkpoints), out=tmp_path / "plain", method="rtn")
    assert digests(tmp_path / "by id") == digests(plain.out)


def test_a_hub_id_that_is_not_cached_says_what_to_do_offline(cache: Path) -> None:
    code = (
        "import sparkquant\n"
        "try:\n    sparkquant.plan('owner/absent')\n"
        "except sparkquant.SparkquantError as error:\n"
        "    print(type(error).__name__, error.exit_code)\n    print(error)\n"
    )
    done = in_a_child(code, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(cache))
    assert done.stdout.splitlines() == [
        "EnvironmentMissing 5",
        "owner/absent is neither a folder nor in the hub cache, and the hub cannot be reached",
        "hint: unset HF_HUB_OFFLINE, go online, or pass the path of a local folder",
    ]
    assert not done.stderr


def test_a_folder_of_the_name_of_a_hub_id_wins(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(source_of("text", checkpoints), tmp_path / "owner" / "model")
    monkeypatch.chdir(tmp_path)
    assert sparkquant.plan("owner/model").source["model_type"] == "qwen3_5_text"


def test_a_misspelled_folder_is_not_looked_for_on_the_hub(checkpoints: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(source_of("text", checkpoints), tmp_path / "models" / "Qwen-27B")
    with pytest.raises(CheckpointError, match=r"no such folder; did you mean .*Qwen-27B\?"):
        sparkquant.plan(tmp_path / "models" / "Qwen-72B")
    with pytest.raises(CheckpointError, match="is a file"):
        sparkquant.plan(tmp_path / "models" / "Qwen-27B" / "config.json")
