"""A result of `quantize` with its evidence, and a hub to publish it to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkquant import evidence
from sparkquant import hub as hub_module
from tests.cli.running import DEMO, invoke
from tests.publishing.hub_server import WRITER
from tests.publishing.running_hub import RunningHub, running_hub


@pytest.fixture(scope="session")
def demo_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with a card, as models on the hub have one."""
    folder = tmp_path_factory.mktemp("source") / "hybrid-5m"
    shutil.copytree(DEMO, folder)
    front = "license: apache-2.0\nlanguage:\n- en\n- de\ntags:\n- code\n- hybrid\npipeline_tag: text-generation\n"
    (folder / "README.md").write_text(f"---\n{front}---\n# hybrid-5m\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def evaluated_once(demo_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantized and evaluated on a few rows by the command line. Copy it before editing."""
    out = tmp_path_factory.mktemp("evaluated") / "out"
    assert invoke("quantize", demo_source, "-r", "qwen-hybrid-fp8", "--method", "rtn", "-o", out).exit_code == 0
    result = invoke("evaluate", out, "--source", demo_source, "--rows", "2", "--tokens", "96")
    assert result.exit_code in (0, 7), result.stdout
    return out


@pytest.fixture
def evaluated(evaluated_once: Path, tmp_path: Path) -> Path:
    """A copy with evidence of quantize, verify and evaluate."""
    out = tmp_path / "out"
    shutil.copytree(evaluated_once, out)
    return out


@pytest.fixture
def ready(evaluated: Path) -> Path:
    """A copy with all the evidence that `publish` asks for.

    No engine runs here: the record of `validate` is written by hand, and says so.
    """
    found = evidence.read(evaluated)["evaluate"]
    result = {**found.result, "checks": [], "ok": True}
    evidence.record(evaluated, "evaluate", result, inputs=found.record["inputs"])
    evidence.record(evaluated, "validate", {"verdict": "pass", "note": "no engine ran: a record of the tests"})
    return evaluated


@pytest.fixture(scope="session")
def hub_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """One server for all tests."""
    with running_hub(tmp_path_factory.mktemp("hub")) as found:
        yield found


@pytest.fixture
def hub(hub_process: RunningHub, tmp_path: Path) -> RunningHub:
    """A hub without repositories, and a client without a cache."""
    hub_process.control("reset", {})
    return RunningHub(hub_process.address, tmp_path / "hub")


@pytest.fixture
def client(hub: RunningHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client of this process, with its settings pointed at the hub and short pauses."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(hub.home / "token"))
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setattr(hub_module, "PAUSES", (0.01, 0.01))
