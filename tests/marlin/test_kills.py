"""Whatever ends a run, no process of it is left: Ctrl-C, SIGTERM, SIGKILL, a server with children of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from sparkquant.marlin.client import Client
from sparkquant.marlin.server import Launch, Server
from tests.cli.running import command, environment
from tests.marlin.serving import FAKE, MARK, SOURCE, VLLM, in_group, marked, rows_of_ids, until, variables


def started(result: Path, tmp_path: Path, fault: str, *more: object) -> subprocess.Popen[str]:
    """A validate run as a process, once two servers of it run."""
    words = command(
        "validate", result, "--reference", SOURCE, "--vllm", VLLM, "--capability", "12.1", "--parallel", 2,
        "--logs", tmp_path / "logs", "--max-tokens", 64,
        "--data", rows_of_ids(tmp_path), *more,
    )  # fmt: skip
    extra = {"FAKE_FAULT": fault, MARK: str(tmp_path), "FAKE_TOKEN_SECONDS": "0.005"}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(extra),
        # A shell's background job ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    # Itself, and a keeper and a server for each of two runs (a soak runs alone).
    wanted = 3 if "--soak" in more else 5
    assert until(lambda: len(marked(str(tmp_path))) >= wanted, 90), process.poll()
    return process


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (signal.SIGINT, ""),
        (signal.SIGKILL, "stubborn"),
        pytest.param(signal.SIGTERM, "orphan", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "hang", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_leaves_no_process(number: int, fault: str, result: Path, tmp_path: Path) -> None:
    with started(result, tmp_path, fault) as process:
        groups = {os.getpgid(pid) for pid in marked(str(tmp_path)) if pid != process.pid}
        process.send_signal(number)
        out, err = process.communicate(timeout=90)
    assert process.returncode == (130 if number == signal.SIGINT else -number), err
    assert out == ""
    assert "Traceback" not in err
    assert until(lambda: marked(str(tmp_path)) == [], 60), marked(str(tmp_path))
    assert groups
    assert [pid for group in groups for pid in in_group(group)] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_soak_is_interrupted_like_any_run(number: int, result: Path, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "candidate.log"
    with started(result, tmp_path, "", "--soak", "1h", "--parallel", 1) as process:
        # Eight answers and eight rows come before the soak.
        assert until(lambda: log.read_bytes().count(b"POST /v1/completions") > 40, 120)
        process.send_signal(number)
        out, err = process.communicate(timeout=90)
    assert process.returncode == (130 if number == signal.SIGINT else -number), err
    assert out == ""
    assert "Traceback" not in err
    assert until(lambda: marked(str(tmp_path)) == [], 60), marked(str(tmp_path))


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tuple(VLLM.split()), (str(SOURCE),), {MARK: str(tmp_path)}, tmp_path / "server.log")


@pytest.mark.parametrize("fault", ["orphan", "slow"])
def test_a_server_ends_with_its_children(fault: str, launch: Launch, tmp_path: Path) -> None:
    with variables(FAKE_FAULT=fault), Server(launch) as server:
        assert server.wait_ready(30) == ""
        assert len(marked(str(tmp_path))) == (3 if fault == "orphan" else 2)
        with Client(server.url) as client:
            assert client.version() == "0.25.1"
            assert client.complete([5, 6, 7], 8).tokens == 8
    assert marked(str(tmp_path)) == []
    assert "Application shutdown complete" in launch.log.read_text()


def test_a_server_that_dies_is_noticed_at_once(launch: Launch) -> None:
    words = Launch((str(FAKE), "--no-such-option"), launch.arguments, launch.environment, launch.log)
    with Server(words) as server:
        assert server.wait_ready(30).startswith("it ended with exit code")
        assert not server.alive


def test_two_servers_never_share_a_port(launch: Launch, tmp_path: Path) -> None:
    other = Launch(launch.command, launch.arguments, launch.environment, tmp_path / "other.log")
    with Server(launch) as one, Server(other) as two:
        assert one.port != two.port
        assert one.wait_ready(30) == two.wait_ready(30) == ""
    assert marked(str(tmp_path)) == []
