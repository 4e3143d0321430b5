"""`publish` against a hub that is a process of its own, spoken to by the real client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sparkquant
from sparkquant import evidence
from sparkquant.errors import CheckFailed, CheckpointError, EnvironmentMissing, Resumable, SparkquantError, UsageError
from sparkquant.publishing import Publication
from sparkquant.report import Status
from tests.cli.running import command, environment, invoke, spawn
from tests.publishing.hub_server import READER, WRITER
from tests.publishing.running_hub import RunningHub
from tests.publishing.sabotage import break_a_scale

# The client sends large files in a way that its transport has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")

REPO = "me/demo"
Publish = Callable[..., Publication]


@pytest.fixture
def publish(client: None) -> Publish:
    """`sparkquant.publish` in this process."""
    return sparkquant.publish


def head(hub: RunningHub, branch: str = "main") -> str:
    return str(hub.get(f"/api/models/{REPO}/revision/{branch}")["sha"])


def files(hub: RunningHub, revision: str = "main") -> set[str]:
    return {entry["rfilename"] for entry in hub.get(f"/api/models/{REPO}/revision/{revision}")["siblings"]}


def tags(hub: RunningHub) -> dict[str, str]:
    return {tag["name"]: tag["targetCommit"] for tag in hub.get(f"/api/models/{REPO}/refs")["tags"]}


# The way there


def test_a_process_publishes_what_another_machine_then_finds_fresh(
    ready: Path, hub: RunningHub, tmp_path: Path
) -> None:
    hub.control("reset", {"page": 4, "part": 1_000_000})
    done = hub.run("publish", ready, REPO, "--base-model", "them/hybrid-5m", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["revision"] == head(hub) == tags(hub)[made["tag"]]
    assert made["tag"] == evidence.read(ready)["quantize"].result["plan"]
    assert made["status"] == "validated"
    assert files(hub) - {".gitattributes"} == set(made["files"])
    assert len(hub.requests("/_objects/")) > 1  # in parts
    fetch = (
        "import sys; from huggingface_hub import snapshot_download; from sparkquant import evidence\n"
        "folder = snapshot_download(sys.argv[1], revision=sys.argv[2], local_dir=sys.argv[3])\n"
        "states = [found.freshness for found in evidence.read(folder).values()]\n"
        "print(evidence.checkpoint_digest(folder), *states)\n"
    )
    line = [command()[0], "-c", fetch, REPO, made["tag"], str(tmp_path / "there")]
    env = environment(hub.environment())
    found = subprocess.run(line, capture_output=True, text=True, env=env, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [evidence.checkpoint_digest(ready), *["fresh"] * 4]
    assert WRITER not in done.stdout + done.stderr
    assert "secret" not in done.stdout + done.stderr


def test_a_dry_run_needs_no_network_and_no_token_and_writes_the_card(ready: Path) -> None:
    (ready / "README.md").unlink()
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "", "HF_HOME": str(ready.parent / "home")}
    done = spawn("publish", ready, REPO, "--dry-run", env=nowhere)
    assert done.returncode == 0, done.stderr
    assert "nothing was sent" in done.stdout
    assert f"would be tagged {evidence.read(ready)['quantize'].result['plan']}" in done.stdout
    assert "**Status: validated.**" in (ready / "README.md").read_text()


def test_a_dry_run_sends_nothing_even_where_it_could(ready: Path, hub: RunningHub, publish: Publish) -> None:
    made = publish(ready, REPO, dry_run=True)
    assert made.revision == made.url == ""
    assert hub.requests() == []
    assert made.bytes == sum((ready / name).stat().st_size for name in made.files)


def test_publishing_twice_makes_one_commit(ready: Path, hub: RunningHub, publish: Publish) -> None:
    first = publish(ready, REPO)
    second = publish(ready, REPO)
    assert first.revision == second.revision == head(hub)
    assert len(hub.control("messages")[REPO]) == 2  # the hub's own first one, and ours


def test_more_evidence_moves_the_tag_and_sends_no_weights(ready: Path, hub: RunningHub, publish: Publish) -> None:
    first = publish(ready, REPO)
    sent = len(hub.requests("/_objects/"))
    evidence.record(ready, "bench", {"decode": {"c1": 40.0}})
    second = publish(ready, REPO)
    assert second.revision != first.revision
    assert tags(hub) == {first.tag: second.revision}
    assert len(hub.requests("/_objects/")) == sent
    assert b"Throughput" in hub.get(f"/{REPO}/resolve/main/README.md")


def test_a_tag_that_names_other_weights_stays(ready: Path, hub: RunningHub, publish: Publish) -> None:
    publish(ready, REPO)
    before = head(hub), tags(hub)
    path = ready / "tokenizer_config.json"
    path.write_bytes(path.read_bytes() + b"\n")
    allowed = ("evaluate", "validate", "verify", "quantize")
    with pytest.raises(UsageError, match="names another checkpoint") as caught:
        publish(ready, REPO, allow_missing=allowed)
    assert "tokenizer_config.json" in caught.value.what
    assert (head(hub), tags(hub)) == before


def test_the_branch_holds_the_checkpoint_alone(ready: Path, hub: RunningHub, publish: Publish) -> None:
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=WRITER)
    api.create_repo(REPO)
    old = ["model-00002-of-00002.safetensors", "model.safetensors.index.json", "sparkquant/evidence/bench.json"]
    api.create_commit(REPO, [CommitOperationAdd(name, b"old") for name in old], commit_message="an older release")
    made = publish(ready, REPO)
    assert made.removed == tuple(sorted(old))
    assert files(hub) == {".gitattributes", *made.files}


def test_another_branch(ready: Path, hub: RunningHub, publish: Publish) -> None:
    made = publish(ready, REPO, branch="fp8-head")
    assert head(hub, "fp8-head") == made.revision
    assert files(hub) == {".gitattributes"}


def test_a_private_repository(ready: Path, hub: RunningHub, publish: Publish) -> None:
    publish(ready, REPO, private=True)
    assert hub.get(f"/api/models/{REPO}")["private"] is True


def test_private_refuses_a_public_repository_before_anything_is_sent(
    ready: Path, hub: RunningHub, publish: Publish
) -> None:
    from huggingface_hub import HfApi

    HfApi(token=WRITER).create_repo(REPO)
    with pytest.raises(UsageError, match="exists and is public"):
        publish(ready, REPO, private=True)
    assert files(hub) == {".gitattributes"}
    assert hub.requests("preupload") == []


def test_hidden_files_and_stale_evidence_stay_at_home(ready: Path, hub: RunningHub, publish: Publish) -> None:
    (ready / ".secret").write_text("x")
    stale = json.loads((ready / "sparkquant/evidence/validate.json").read_text())
    (ready / "sparkquant/evidence/validate.json").write_text(json.dumps({**stale, "checkpoint": "xxh3-128:0"}))
    made = publish(ready, REPO, allow_missing=["validate"])
    assert ".secret" not in files(hub)
    assert "sparkquant/evidence/validate.json" not in files(hub)
    assert made.standing == "verified"


# What keeps it from going


def problems(folder: Path, *allowed: str) -> list[str]:
    """What a dry run finds missing, by verb or check."""
    with pytest.raises(CheckFailed) as caught:
        sparkquant.publish(folder, REPO, dry_run=True, allow_missing=allowed)
    assert caught.value.exit_code == 4
    return [problem.where for problem in caught.value.problems]


def test_missing_evidence_is_listed_with_what_to_run(evaluated: Path) -> None:
    for path in (evaluated / "sparkquant/evidence").iterdir():
        path.unlink()
    result = invoke("publish", evaluated, REPO, "--dry-run")
    assert result.exit_code == 4
    for verb in ("quantize", "verify", "evaluate", "validate"):
        assert f"  {verb}: no evidence; run `sparkquant {verb} " in result.stderr
    assert result.stdout == ""
    assert (evaluated / "README.md").exists()
    assert problems(evaluated, "quantize", "verify", "validate") == ["evaluate"]


@pytest.mark.parametrize("verb", ["quantize", "verify", "evaluate", "validate", "bench"])
def test_red_evidence_is_never_published(ready: Path, verb: str) -> None:
    evidence.record(ready, verb, {**_result(ready, verb), "ok": False, "checks": []})
    assert problems(ready, "quantize", "verify", "evaluate", "validate", "bench") == [verb]


def _result(folder: Path, verb: str) -> dict[str, Any]:
    found = evidence.read(folder).get(verb)
    return dict(found.result) if found else {}


@pytest.mark.parametrize("verb", ["quantize", "verify", "evaluate", "validate", "bench"])
def test_inconclusive_evidence_needs_to_be_allowed(ready: Path, verb: str) -> None:
    evidence.record(ready, verb, _result(ready, verb), outcome=Status.INCONCLUSIVE)
    assert problems(ready) == [verb]
    assert sparkquant.publish(ready, REPO, dry_run=True, allow_missing=[verb]).files


def test_any_changed_byte_makes_everything_stale(ready: Path) -> None:
    data = bytearray((ready / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (ready / "model.safetensors").write_bytes(data)
    assert problems(ready) == ["quantize", "verify", "evaluate", "validate"]
    result = invoke("publish", ready, REPO, "--dry-run")
    assert (
        "validate: its evidence is stale: the checkpoint has changed since; run `sparkquant validate" in result.stderr
    )


def test_a_folder_that_is_wrong_now_is_refused_whatever_its_evidence_says(ready: Path) -> None:
    (ready / "config.json").write_text((ready / "config.json").read_text().replace('"float-quantized"', '"dense"'))
    for verb in ("quantize", "verify", "evaluate", "validate"):
        evidence.record(ready, verb, {**_result(ready, verb), "checks": [], "ok": True})
    found = problems(ready)
    assert found
    assert not set(found) & {"quantize", "verify", "evaluate", "validate"}


def test_stored_values_are_looked_at_again_before_sending(ready: Path, hub: RunningHub, publish: Publish) -> None:
    break_a_scale(ready / "model.safetensors")
    for verb in ("quantize", "verify", "evaluate", "validate"):
        evidence.record(ready, verb, {**_result(ready, verb), "checks": [], "ok": True})
    with pytest.raises(CheckFailed, match="nothing was sent") as caught:
        publish(ready, REPO)
    assert any(problem.where.startswith("scales.") for problem in caught.value.problems), caught.value
    assert hub.requests() == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["demo"], "is no repository"),
        (["me/../x"], "is no repository"),
        ([REPO, "--branch", "a b"], "is no branch name"),
        ([REPO, "--allow-missing", "validte"], "did you mean 'validate'"),
        ([REPO, "--base-model", "a folder"], "is no repository"),
    ],
)
def test_names_are_checked_first(ready: Path, arguments: list[str], told: str) -> None:
    result = invoke("publish", ready, *arguments, "--dry-run")
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_card_of_someone_else_is_not_overwritten(ready: Path) -> None:
    (ready / "README.md").write_text("# my own card\n")
    result = invoke("publish", ready, REPO, "--dry-run")
    assert result.exit_code == 2
    assert "was not written by sparkquant" in result.stderr
    assert (ready / "README.md").read_text() == "# my own card\n"


def test_a_checkpoint_of_another_producer_is_refused(demo_source: Path) -> None:
    result = invoke("publish", demo_source, REPO, "--dry-run")
    assert result.exit_code == 3
    assert "is no result of sparkquant" in result.stderr


# When the hub fails


def test_without_a_token_nothing_is_tried(
    ready: Path, hub: RunningHub, client: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    done = invoke("publish", ready, REPO)
    assert done.exit_code == 5
    assert "no token for the hub" in done.stderr
    assert hub.requests() == []


@pytest.mark.parametrize("token", ["hf_of_nobody", READER])
def test_a_token_without_the_right_is_told_and_not_shown(
    ready: Path, hub: RunningHub, publish: Publish, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(EnvironmentMissing) as caught:
        publish(ready, REPO)
    assert f"the hub answers {403 if token == READER else 401}" in caught.value.what
    assert "hf auth login" in caught.value.hint
    assert token not in str(caught.value)
    assert len(hub.requests()) <= 2


def test_a_namespace_of_someone_else(ready: Path, publish: Publish) -> None:
    with pytest.raises(EnvironmentMissing, match="the hub answers 403"):
        publish(ready, "them/demo")


STEPS = {
    "create": "POST /api/repos/create",
    "info": "GET /api/models/me/demo",
    "refs": "GET .*/refs",
    "tree": "GET .*/tree/.*",
    "card": "POST /api/validate-yaml",
    "commit": "POST .*/commit/main",
    "tag": "POST .*/tag/.*",
}
"""Calls that the client itself does not repeat."""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "how", [{"status": 503}, {"cut": True}, {"status": 504, "after": True}], ids=["503", "cut", "late"]
)
def test_a_step_that_fails_once_is_repeated(
    ready: Path, hub: RunningHub, publish: Publish, step: str, how: dict[str, Any]
) -> None:
    hub.control("faults", [{"on": STEPS[step], **how}])
    made = publish(ready, REPO)
    assert made.revision == head(hub) == tags(hub)[made.tag]
    assert files(hub) == {".gitattributes", *made.files}
    assert len(hub.control("messages")[REPO]) == 2


@pytest.mark.parametrize("step", STEPS)
def test_a_hub_that_stays_away_leaves_what_the_same_command_finishes(
    ready: Path, hub: RunningHub, publish: Publish, step: str
) -> None:
    hub.control("faults", [{"on": STEPS[step], "status": 500, "times": 99}])
    with pytest.raises(Resumable) as caught:
        publish(ready, REPO)
    assert caught.value.exit_code == 6
    assert "the same command" in caught.value.hint
    assert WRITER not in str(caught.value)
    sent = len(hub.requests("/_objects/"))
    hub.control("faults", [])
    made = publish(ready, REPO)
    assert made.revision == head(hub) == tags(hub)[made.tag]
    if sent:
        assert len(hub.requests("/_objects/")) == sent  # what had arrived is not sent again


def test_a_failed_upload_leaves_the_branch_as_it_was_and_goes_on(
    ready: Path, hub: RunningHub, publish: Publish
) -> None:
    (ready / "extra.safetensors").unlink(missing_ok=True)
    hub.control("faults", [{"on": "PUT /_objects/.*", "status": 403, "times": 99}])
    with pytest.raises(SparkquantError) as caught:
        publish(ready, REPO)
    assert "secret" not in str(caught.value)
    assert files(hub) == {".gitattributes"}
    assert tags(hub) == {}
    hub.control("faults", [])
    assert publish(ready, REPO).revision == head(hub)


def test_someone_who_pushes_meanwhile_is_not_overwritten(ready: Path, hub: RunningHub, publish: Publish) -> None:
    from huggingface_hub import HfApi

    pushed = False

    def push(event: object) -> None:
        nonlocal pushed
        if getattr(event, "phase", "") == "upload" and not pushed:
            pushed = True
            HfApi(token=WRITER).upload_file(path_or_fileobj=b"mine", path_in_repo="mine.txt", repo_id=REPO)

    with pytest.raises(Resumable, match="the hub answers 412"):
        publish(ready, REPO, listener=push)
    assert files(hub) == {".gitattributes", "mine.txt"}
    made = publish(ready, REPO)
    assert made.removed == ("mine.txt",)


def test_a_folder_that_changes_while_it_is_sent_is_not_committed(
    ready: Path, hub: RunningHub, publish: Publish
) -> None:
    def change(event: object) -> None:
        if getattr(event, "what", "") == "config.json" and getattr(event, "phase", "") == "upload":
            (ready / "config.json").write_bytes((ready / "config.json").read_bytes() + b" ")

    with pytest.raises(CheckpointError, match="was changed while it was sent"):
        publish(ready, REPO, listener=change)
    assert files(hub) == {".gitattributes"}


def test_offline_mode_is_named(ready: Path, hub: RunningHub, client: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = invoke("publish", ready, REPO)
    assert done.exit_code == 5
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert hub.requests() == []


def test_killed_half_way_the_same_command_goes_on(ready: Path, hub: RunningHub, client: None) -> None:
    hub.control("faults", [{"on": "POST .*/commit/main", "status": 503, "times": 99}])
    process = subprocess.Popen(
        command("publish", ready, REPO), env=environment(hub.environment()), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    limit = time.monotonic() + 120
    while not hub.requests("/commit/main"):
        assert time.monotonic() < limit
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    out, err = process.communicate()
    sent = len(hub.requests("/_objects/"))
    assert sent
    assert files(hub) == {".gitattributes"}
    hub.control("faults", [])
    done = invoke("publish", ready, REPO)
    assert done.exit_code == 0, done.stderr
    assert len(hub.requests("/_objects/")) == sent
    assert tags(hub) == {evidence.read(ready)["quantize"].result["plan"]: head(hub)}
    assert WRITER not in out + err + done.stdout + done.stderr
    assert all(WRITER not in path.read_text() for path in ready.rglob("*.json"))
