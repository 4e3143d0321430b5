"""Servers may send anything, or nothing: every way ends as an error in words, in time, and never as a number."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from sparkquant.errors import EnvironmentMissing, UsageError
from sparkquant.marlin.answers import scored_nan
from sparkquant.marlin.client import PATIENCE, Client, address_of
from sparkquant.marlin.coherence import inspect
from sparkquant.marlin.controls import Observation, Role
from sparkquant.marlin.dialect import Settings
from sparkquant.marlin.symptom import Kind, examine_server
from tests.cli.running import ROOT, environment, invoke
from tests.marlin.misbehaving import BODIES, STREAMS
from tests.marlin.serving import until, variables

ROW = (5, 6, 7)
TRANSPORT = ("hang", "drop", "trickle", "cut", "elsewhere", "gzip")
NO_NUMBER = ("nan-text", "number-text", "true", "positive", "nan", "infinite")
OF_ANSWERS = {"nan-text", "number-text", "true", "positive", "nan", "infinite"}
"""Answers that are read, and whose log probabilities are none."""
READ = {"short-row", "other-token", *OF_ANSWERS}
"""Bodies that are a sound answer to a question without scores."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the misbehaving server listens; a folder says how it does."""
    file = tmp_path_factory.mktemp("misbehaving") / "port"
    process = subprocess.Popen([sys.executable, "-m", "tests.marlin.misbehaving", file], cwd=ROOT, env=environment())
    assert until(file.exists)
    yield f"http://127.0.0.1:{file.read_text()}"
    process.kill()
    process.wait()


@pytest.mark.parametrize("how", [*TRANSPORT, *BODIES])
def test_no_score_comes_of_a_reply_that_holds_none(how: str, place: str) -> None:
    with Client(f"{place}/{how}", model="m", limit=0.4) as client:
        positions, error = client.score(ROW, 20)
    assert positions == []
    assert error
    run = Observation(Role.CANDIDATE, Settings(), None, scoring=error)
    assert scored_nan(run) == (how in NO_NUMBER)


@pytest.mark.parametrize("how", [*TRANSPORT, *BODIES])
def test_no_answer_comes_of_a_reply_that_is_none(how: str, place: str) -> None:
    with Client(f"{place}/{how}", model="m", limit=0.4) as client:
        found = client.complete(ROW, 8)
    assert bool(found.error) == (how not in READ), found
    if how in OF_ANSWERS - {"positive", "infinite"}:
        assert "nan" in [finding.id for finding in inspect(found.text, found.token_ids, None, found.logprobs)]


@pytest.mark.parametrize("how", [*TRANSPORT, *BODIES, *STREAMS])
def test_no_rate_comes_of_a_stream_that_is_none(how: str, place: str) -> None:
    with Client(f"{place}/{how}", model="m", limit=0.4) as client:
        found = client.stream(ROW, 8)
    assert found.error
    assert found.tokens == 0


@pytest.mark.parametrize("how", [*TRANSPORT, *BODIES])
def test_pages_that_are_none_are_nothing(how: str, place: str) -> None:
    with Client(f"{place}/{how}", limit=0.4) as client:
        assert client.version() == ""
        assert not client.metrics().known
        with pytest.raises(EnvironmentMissing, match="no OpenAI-compatible server answers"):
            client.model  # noqa: B018


def test_a_server_that_hangs_is_not_asked_everything(place: str) -> None:
    with Client(f"{place}/hang", model="m", limit=0.2) as client:
        began = time.monotonic()
        errors = [client.complete(ROW, 8).error for _ in range(50)]
        assert [error.startswith("not asked") for error in errors] == [False] * PATIENCE + [True] * 48
        assert client.score(ROW, 20)[1].startswith("not asked")
        assert client.stream(ROW, 8).error.startswith("not asked")
        assert time.monotonic() - began < 50 * 0.2


@pytest.mark.parametrize("how", ["html", "half", "null-choice", "cut"])
def test_a_diagnosis_of_a_server_that_answers_nothing_sensible(how: str, place: str) -> None:
    with pytest.raises(EnvironmentMissing):
        examine_server(f"{place}/{how}", limit=0.4)
    found = invoke("diagnose", "--url", f"{place}/{how}")
    assert found.exit_code == 5
    assert "hint: " in found.stderr


def test_a_key_is_taken_from_the_variable_of_the_engine(place: str) -> None:
    with pytest.raises(EnvironmentMissing, match="HTTP 401") as raised, Client(f"{place}/locked") as client:
        client.model  # noqa: B018
    assert "VLLM_API_KEY" in str(raised.value.hint)
    with variables(VLLM_API_KEY="sesame"), Client(f"{place}/locked") as client:
        assert client.model == "m"
    with variables(VLLM_API_KEY="sesame"):
        assert examine_server(f"{place}/locked", limit=0.4).kind is Kind.SILENT  # no answer has choices


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        (" http://localhost:8000/ ", "http://localhost:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("http://localhost:8000/v1/chat/completions", "http://localhost:8000"),
        ("https://host/models/v1/completions", "https://host/models"),
        ("https://host/one/v1", "https://host/one"),
    ],
)
def test_an_address_is_found_in_what_people_copy(url: str, base: str) -> None:
    assert address_of(url) == base


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "localhost", "ftp://localhost", "http://", "http://[::1", "http://a:99999999", "file:///x",
     "http://a b", "http://\x00", "http://host/v1?key=1", "-", "http://host:port"],
)  # fmt: skip
def test_what_is_no_address_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match=r"is (?:no|an) address"):
        address_of(url)
    found = invoke("diagnose", "--url", url)
    assert found.exit_code == 2
    assert "http://localhost:8000" in found.stderr
