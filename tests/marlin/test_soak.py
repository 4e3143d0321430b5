"""A server under load: what breaks late is found, whatever it is, and what was so from the beginning is no news."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sparkquant.events import ignore
from sparkquant.marlin.client import Client
from sparkquant.marlin.controls import TOP, questions
from sparkquant.marlin.prompts import Ask, Prompts
from sparkquant.marlin.server import Launch, Server
from sparkquant.marlin.soak import Load, after_soak, soak
from sparkquant.marlin.verdict import Outcome, Verdict
from tests.marlin.serving import VLLM, variables

PROMPTS = Prompts(
    rows=(tuple(range(5, 30)), tuple(range(40, 70))),
    asks=tuple(Ask(kind="text", ids=tuple(range(first, first + 9))) for first in range(10, 130, 10)),
)
FRESH = len(PROMPTS.asks) + len(PROMPTS.rows)
"""Requests before the load."""
PASSED = Verdict(outcome=Outcome.PASS, summary="all is well", evidence=(), next="sparkquant bench OUT")


@contextmanager
def fresh(result: Path, tmp_path: Path, fault: str, **more: str) -> Iterator[tuple[Client, Server, Load]]:
    """A server with a fault that has answered everything once."""
    launch = Launch(tuple(VLLM.split()), (str(result), "--linear-backend", "marlin"), {}, tmp_path / "server.log")
    with variables(FAKE_FAULT=fault, **more), Server(launch) as server:
        assert server.wait_ready(30) == ""
        with Client(server.url, limit=1.0) as client:
            seen = questions(client, PROMPTS, (1,), 48)
            yield client, server, Load(PROMPTS, seen["answers"][1], seen["scores"], 48)


def soaked(result: Path, tmp_path: Path, fault: str, seconds: float, **more: str) -> dict[str, Any]:
    with fresh(result, tmp_path, fault, **more) as (client, server, load):
        return soak(client, server, load, seconds, ignore)


def judged(found: dict[str, Any]) -> Verdict:
    return after_soak(PASSED, found, 0.01, "sparkquant diagnose OUT")


def test_a_sound_server_stays_sound(result: Path, tmp_path: Path) -> None:
    found = soaked(result, tmp_path, "", 1.0)
    assert judged(found) == PASSED
    assert found["requests"] > 10
    assert 0 < found["tokens"] <= 48 * found["requests"]
    assert found["kl_to_before"] == 0
    assert min(found["host_bytes"]) > 2**20


def test_answers_that_break_late_are_a_kernel_fault(result: Path, tmp_path: Path) -> None:
    found = soaked(result, tmp_path, "late", 30.0, FAKE_LATE=str(FRESH + 60))
    told = judged(found)
    assert (told.outcome, told.next) == (Outcome.KERNEL_FAULT, "sparkquant diagnose OUT")
    assert "an answer broke under load: after" in told.summary
    assert found["requests"] >= 59
    assert found["seconds"] < 25, "it does not go on for the whole time when it knows enough"


def test_numbers_that_drift_are_a_kernel_fault(result: Path, tmp_path: Path) -> None:
    found = soaked(result, tmp_path, "drift", 0.5, FAKE_LATE=str(FRESH + 1))
    assert found["broken"] == []
    assert found["kl_to_before"] > 0.05
    assert judged(found).outcome is Outcome.KERNEL_FAULT


def test_a_leak_is_seen(result: Path, tmp_path: Path) -> None:
    found = soaked(result, tmp_path, "leak", 1.5)
    assert found["grown"]
    assert judged(found).outcome is Outcome.INCONCLUSIVE
    assert "memory grew" in judged(found).summary


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("crash", "illegal instruction"),
        pytest.param("stall", "not asked: 2 requests", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_ends_or_hangs_late(fault: str, what: str, result: Path, tmp_path: Path) -> None:
    found = soaked(result, tmp_path, fault, 60.0, FAKE_LATE=str(FRESH + 20))
    told = judged(found)
    assert told.outcome is Outcome.INCONCLUSIVE
    assert any(what in item.what for item in told.evidence)
    assert found["alive"] == (fault == "stall")
    assert found["seconds"] < 30


def test_what_an_answer_always_does_is_no_news(result: Path, tmp_path: Path) -> None:
    assert judged(soaked(result, tmp_path, "bangs", 0.5)) == PASSED


def test_a_soak_makes_no_verdict_better(result: Path, tmp_path: Path) -> None:
    failed = PASSED.model_copy(update={"outcome": Outcome.CHECKPOINT_FAULT, "summary": "far from the reference"})
    with fresh(result, tmp_path, "") as (client, server, load):
        server.stop()
        found = soak(client, server, load, 60.0, ignore)
        assert client.score(PROMPTS.rows[0], TOP)[1]
    told = after_soak(failed, found, 0.01, "another command")
    assert (told.outcome, told.summary, told.next) == (failed.outcome, failed.summary, failed.next)
    assert any(item.where == "soak" for item in told.evidence)
    assert found["requests"] == 0
