"""`sparkquant report`: where it writes, what it refuses, and what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkquant import evidence
from tests.cli.running import environment, invoke
from tests.reporting.conftest import Page

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


def test_a_page_goes_to_report_html(int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("report", int4)
    assert done.exit_code == 0, done.stderr
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert done.stdout == f"report.html: {len(text.encode()):,} bytes\n"
    assert Page(text).root.all("h1")[0].text == "int4"
    assert invoke("report", int4).exit_code == 0, "a report is replaced"


def test_the_form_follows_the_file_or_is_asked_for(int4: Path, tmp_path: Path) -> None:
    for name, begins in (
        ("r.md", "<!-- sparkquant report"),
        ("r.json", '{\n "report": "sparkquant'),
        ("r.htm", "<!doctype"),
    ):
        assert invoke("report", int4, "-o", tmp_path / name).exit_code == 0
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(begins)
        assert invoke("report", int4, "-o", tmp_path / name).exit_code == 0
    assert invoke("report", int4, "--format", "md").stdout.startswith("<!-- sparkquant report")
    assert json.loads(invoke("report", int4, "--format", "json").stdout)["checkpoints"][0]["name"] == "int4"
    assert invoke("report", int4, "-o", "-").stdout.startswith("<!doctype html>")


def test_what_is_refused(int4: Path, copied: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("<p>mine</p>", encoding="utf-8")
    result = copied("result")
    for arguments, code, words in (
        ([int4, "-o", tmp_path / "mine.html"], 2, "is no report"),
        ([result, "-o", result / "report.html"], 2, "make its evidence stale"),
        ([int4, "-o", tmp_path / "no" / "r.html"], 2, "existing folder"),
        ([int4, int4], 2, "named twice"),
        ([int4, "--format", "pdf"], 2, "no form 'pdf'"),
        ([tmp_path / "nowhere"], 3, "no such folder"),
    ):
        done = invoke("report", *arguments)
        assert done.exit_code == code, done.stderr
        assert words in done.stderr
        assert "hint:" in done.stderr
    assert (tmp_path / "mine.html").read_text(encoding="utf-8") == "<p>mine</p>"


def test_a_report_changes_nothing_in_the_checkpoint(copied: Callable[[str], Path], tmp_path: Path) -> None:
    result = copied("result")
    before = evidence.checkpoint_digest(result)
    assert invoke("report", result, "-o", tmp_path / "r.html").exit_code == 0
    assert evidence.checkpoint_digest(result) == before


def test_without_matplotlib_there_is_text_and_a_hint(int4: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.modules['jinja2'] = None\n"
        "from sparkquant.cli import main; main()"
    )

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-c", code, "report", str(int4), *options]
        return subprocess.run(arguments, capture_output=True, text=True, env=environment(), cwd=tmp_path, check=False)

    done = run()
    assert (done.returncode, done.stdout) == (5, "")
    assert "pip install 'sparkquant[report]'" in done.stderr
    assert not (tmp_path / "report.html").exists()
    done = run("--format", "md")
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stderr
    assert "## What was lost" in done.stdout
