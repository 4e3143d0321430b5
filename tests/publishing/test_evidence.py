"""Evidence is bound to the bytes of a checkpoint, and every reader is told when it is not."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from sparkquant import evidence
from sparkquant.errors import CheckpointError, UsageError
from sparkquant.evidence import Freshness
from sparkquant.report import Status
from tests.cli.running import invoke, spawn
from tests.execution.runs import in_a_child


def outcomes(folder: Path) -> dict[str, tuple[str, str | None]]:
    """Freshness and outcome by verb."""
    return {verb: (str(found.freshness), found.outcome) for verb, found in evidence.read(folder).items()}


# What the digest names


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja",
                                  "sparkquant/plan.json", "sparkquant/recipe.yaml", "SOURCE_README.md"])  # fmt: skip
def test_every_file_that_is_published_counts(evaluated: Path, name: str) -> None:
    before = evidence.checkpoint_digest(evaluated)
    path = evaluated / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert evidence.checkpoint_digest(evaluated) != before
    assert {found.freshness for found in evidence.read(evaluated).values()} == {Freshness.STALE}


@pytest.mark.parametrize("change", ["new", "gone", "renamed", "swapped"])
def test_names_count_as_contents_do(evaluated: Path, change: str) -> None:
    before = evidence.checkpoint_digest(evaluated)
    one, two = evaluated / "tokenizer.json", evaluated / "config.json"
    if change == "new":
        (evaluated / "more.json").write_text("")
    elif change == "gone":
        one.unlink()
    elif change == "renamed":
        one.rename(evaluated / "tokenizer2.json")
    else:
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
    assert evidence.checkpoint_digest(evaluated) != before


def test_card_evidence_and_hidden_files_do_not_count(evaluated: Path) -> None:
    before = evidence.checkpoint_digest(evaluated)
    (evaluated / "README.md").write_text("other words")
    (evaluated / "sparkquant/evidence/verify.json").unlink()
    (evaluated / "sparkquant/evidence/notes.txt").write_text("x")
    (evaluated / ".gitattributes").write_text("x")
    (evaluated / ".cache" / "huggingface").mkdir(parents=True)
    (evaluated / ".cache" / "huggingface" / "model.safetensors").write_text("x")
    assert evidence.checkpoint_digest(evaluated) == before
    (evaluated / "more").mkdir()
    (evaluated / "more" / "README.md").write_text("a card below the top is a file like others")
    assert evidence.checkpoint_digest(evaluated) != before


def test_a_hidden_shard_counts(evaluated: Path) -> None:
    before = evidence.checkpoint_digest(evaluated)
    (evaluated / ".model.safetensors").write_bytes(b"an index may name it")
    assert evidence.checkpoint_digest(evaluated) != before


def test_the_digest_is_that_of_place_and_time_of_no_machine(evaluated: Path, tmp_path: Path) -> None:
    before = evidence.checkpoint_digest(evaluated)
    moved = evaluated.rename(tmp_path / "elsewhere")
    for path in moved.rglob("*"):
        os.utime(path, (0, 0))
    assert evidence.checkpoint_digest(moved) == before


def test_known_digests_are_taken_and_the_rest_is_read(evaluated: Path) -> None:
    whole = evidence.checkpoint_digest(evaluated)
    known = {"model.safetensors": evidence.file_digest(evaluated / "model.safetensors")}
    read: list[Any] = []
    assert evidence.checkpoint_digest(evaluated, known=known, listener=read.append) == whole
    assert "model.safetensors" not in [getattr(event, "what", "") for event in read]
    wrong = {"model.safetensors": "0" * 32}
    assert evidence.checkpoint_digest(evaluated, known=wrong) != whole


@pytest.mark.parametrize("kind", ["pipe", "dead link", "linked folder"])
def test_what_is_no_file_is_refused_at_once(evaluated: Path, tmp_path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(evaluated / "x")
    else:
        (tmp_path / "other").mkdir()
        (evaluated / "x").symlink_to(tmp_path / ("other" if kind == "linked folder" else "absent"))
    with pytest.raises(CheckpointError, match="not all of it is regular files"):
        evidence.checkpoint_digest(evaluated)


# What verbs leave


def test_quantize_and_evaluate_leave_fresh_evidence(evaluated: Path) -> None:
    found = evidence.read(evaluated)
    assert list(found) == ["evaluate", "quantize", "verify"]
    assert {record.freshness for record in found.values()} == {Freshness.FRESH}
    quantized = found["quantize"]
    plan = json.loads((evaluated / "sparkquant/plan.json").read_text())
    assert quantized.result["totals"] == plan["totals"]
    assert quantized.record["inputs"] == {"source": "hybrid-5m"}
    checks = found["verify"].result["checks"]
    assert {check["status"] for check in checks} <= {"pass", "skipped", "warn"}
    assert any(check["id"].startswith("source.") and check["status"] == "pass" for check in checks)
    assert found["evaluate"].result["tokens"] > 0
    assert found["evaluate"].record["inputs"]["rows"] == 2


def test_verify_records_what_it_found_red_or_green(evaluated: Path, demo_source: Path) -> None:
    assert invoke("verify", evaluated).exit_code == 0
    assert outcomes(evaluated)["verify"] == ("fresh", "pass")
    (evaluated / "tokenizer.json").unlink()
    assert outcomes(evaluated)["verify"] == ("stale", "pass")
    assert invoke("verify", evaluated, "--source", demo_source).exit_code == 4
    assert outcomes(evaluated)["verify"] == ("fresh", "fail")
    assert outcomes(evaluated)["evaluate"][0] == "stale"


def test_a_lesser_check_does_not_replace_a_greater_one(evaluated: Path) -> None:
    def inputs() -> dict[str, Any]:
        return dict(evidence.read(evaluated)["verify"].record["inputs"])

    assert invoke("verify", evaluated).exit_code == 0
    assert inputs() == {"source": "hybrid-5m", "level": "default"}
    assert invoke("verify", evaluated, "--deep").exit_code == 0
    assert (inputs()["source"], inputs()["level"]) == (None, "deep")


@pytest.mark.parametrize("arguments", [["--no-evidence"], ["--headers"]])
def test_verify_writes_nothing_where_it_is_told_so_or_reads_no_weights(evaluated: Path, arguments: list[str]) -> None:
    path = evaluated / "sparkquant/evidence/verify.json"
    before = path.read_bytes()
    assert invoke("verify", evaluated, *arguments).exit_code == 0
    assert path.read_bytes() == before


def test_a_checkpoint_of_another_producer_is_left_alone(evaluated: Path) -> None:
    for path in sorted((evaluated / "sparkquant").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (evaluated / "sparkquant").rmdir()
    before = sorted(evaluated.rglob("*"))
    result = invoke("verify", evaluated)
    assert result.exit_code == 0
    assert "evidence" not in result.stderr
    assert sorted(evaluated.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_measured_all_the_same(evaluated: Path) -> None:
    (evaluated / "sparkquant/evidence").chmod(0o500)
    result = invoke("verify", evaluated)
    assert result.exit_code == 0
    assert "no evidence was kept" in result.stderr


def test_a_linked_evidence_folder_is_not_written_through(evaluated: Path, tmp_path: Path) -> None:
    place = evaluated / "sparkquant/evidence"
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    assert "is a link" in evidence.unrecordable(evaluated)
    with pytest.raises(UsageError, match="is a link"):
        evidence.record(evaluated, "bench", {})
    assert evidence.read(evaluated) == {}


def test_a_folder_that_no_digest_can_name_is_checked_all_the_same(evaluated: Path) -> None:
    os.mkfifo(evaluated / "pipe")
    result = invoke("verify", evaluated)
    assert result.exit_code == 4
    assert "no evidence was kept" in result.stderr


def test_a_snapshot_of_the_hub_cache_is_not_written(evaluated: Path, tmp_path: Path) -> None:
    (tmp_path / "models--o--m" / "snapshots").mkdir(parents=True)
    moved = evaluated.rename(tmp_path / "models--o--m" / "snapshots" / "0")
    assert "hub's cache" in evidence.unrecordable(moved)


# The record


def test_a_record_names_no_place_of_this_machine(evaluated: Path, demo_source: Path) -> None:
    assert invoke("verify", evaluated, "--source", demo_source).exit_code == 0
    home = Path.home() / "somewhere"
    evidence.record(
        evaluated, "bench",
        {"log": f"serving {evaluated}/model.safetensors", "cache": str(home)},
        inputs={"source": str(demo_source), "reference": "Qwen/Qwen3.5-27B"},
    )  # fmt: skip
    for path in (evaluated / "sparkquant/evidence").iterdir():
        text = path.read_text()
        assert str(evaluated.parent) not in text
        assert str(demo_source.parent) not in text
        assert str(Path.home()) not in text
    found = evidence.read(evaluated)["bench"]
    assert found.result == {"log": "serving out/model.safetensors", "cache": "~/somewhere"}
    assert found.record["inputs"] == {"source": "hybrid-5m", "reference": "Qwen/Qwen3.5-27B"}


def test_only_the_date_differs_and_an_epoch_fixes_it(evaluated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    first = evidence.record(evaluated, "bench", {"b": 1, "a": [1.5, None]}).read_bytes()
    assert evidence.record(evaluated, "bench", {"a": [1.5, None], "b": 1}).read_bytes() == first
    assert json.loads(first)["date"] == "2001-09-09T01:46:40Z"
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    later = json.loads(evidence.record(evaluated, "bench", {"b": 1, "a": [1.5, None]}).read_bytes())
    assert {key for key, value in json.loads(first).items() if later[key] != value} == {"date"}


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ({}, "pass"),
        ({"ok": True}, "pass"),
        ({"ok": False}, "fail"),
        ({"checks": [{"status": "pass"}, {"status": "fail"}]}, "fail"),
        ({"ok": True, "checks": [{"status": "inconclusive"}]}, "inconclusive"),
        ({"ok": False, "checks": [{"status": "pass"}, {"status": "inconclusive"}]}, "inconclusive"),
        ({"verdict": "pass"}, "pass"),
        ({"verdict": "kernel-fault", "ok": True}, "fail"),
        ({"verdict": {"outcome": "checkpoint-fault"}}, "fail"),
        ({"outcome": "environment-fault"}, "inconclusive"),
        ({"verdict": {"outcome": "inconclusive"}}, "inconclusive"),
        ({"ok": True, "checks": [{"status": "warn"}, {"status": "skipped"}]}, "pass"),
    ],
)
def test_the_outcome_follows_the_checks(result: dict[str, Any], outcome: str) -> None:
    assert evidence.outcome_of(result) == outcome


def test_a_caller_may_state_the_outcome(evaluated: Path) -> None:
    evidence.record(evaluated, "validate", {"verdict": "environment-fault"}, outcome=Status.INCONCLUSIVE)
    assert outcomes(evaluated)["validate"] == ("fresh", "inconclusive")


def test_what_changed_during_a_measurement_has_no_evidence(evaluated: Path) -> None:
    seen = evidence.state_of(evaluated)
    (evaluated / "config.json").write_bytes((evaluated / "config.json").read_bytes() + b"\n")
    with pytest.raises(CheckpointError, match="was changed while it was measured"):
        evidence.record(evaluated, "bench", {}, since=seen)
    assert "bench" not in evidence.read(evaluated)


@pytest.mark.parametrize("verb", ["", "../x", "a/b", "Bench", "x" * 50])
def test_a_verb_is_a_plain_word(evaluated: Path, verb: str) -> None:
    with pytest.raises(UsageError, match="is no verb"):
        evidence.record(evaluated, verb, {})


def test_nan_is_no_evidence(evaluated: Path) -> None:
    with pytest.raises(UsageError, match="no plain JSON"):
        evidence.record(evaluated, "bench", {"tps": float("nan")})
    assert "bench" not in evidence.read(evaluated)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "char 0|column|1:1"),
        ("[]", "a JSON object is needed"),
        ('{"format": 99}', "its format is 99"),
        ('{"format": 1, "verb": "other"}', "it is a record of 'other'"),
        ('{"format": 1, "verb": "bench", "outcome": "great"}', "its outcome is 'great'"),
    ],
)
def test_what_cannot_be_read_says_why(evaluated: Path, text: str, why: str) -> None:
    (evaluated / "sparkquant/evidence/bench.json").write_text(text)
    found = evidence.read(evaluated)["bench"]
    assert (found.freshness, found.outcome, found.green) == (Freshness.UNREADABLE, None, False)
    assert re.search(why, found.why), found.why


def test_a_linked_record_is_not_read(evaluated: Path, tmp_path: Path) -> None:
    path = evaluated / "sparkquant/evidence/verify.json"
    path.rename(tmp_path / "verify.json")
    path.symlink_to(tmp_path / "verify.json")
    assert str(evidence.read(evaluated)["verify"]) == "verify: unreadable (it is a link)"


def test_reading_evidence_needs_no_torch(evaluated: Path) -> None:
    result = spawn("publish", evaluated, "me/demo", "--dry-run", "--allow-missing", "nothing")
    assert result.returncode == 2
    code = (
        "import sys; from sparkquant import evidence, card, publishing\n"
        "evidence.read(sys.argv[1])\n"
        "assert not {'torch', 'numpy', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
    )
    in_a_child(code, evaluated)
