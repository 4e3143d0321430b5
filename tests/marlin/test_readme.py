"""The README shows what `diagnose` prints of a recorded log."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.cli.running import ROOT, spawn
from tests.marlin.synthetic import LOGS


def test_the_diagnosis_in_the_readme_is_what_is_printed(tmp_path: Path) -> None:
    shutil.copy(LOGS / "vllm-0.25.1-h200-marlin-eager.log", tmp_path / "vllm.log")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^\$ sparkquant diagnose --server-log vllm\.log\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    done = spawn("diagnose", "--server-log", "vllm.log", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    pattern = "".join(r"(?:.*\n)*?" if line == "...\n" else re.escape(line) for line in shown.splitlines(keepends=True))
    assert re.fullmatch(pattern, done.stdout), done.stdout
