"""Two runs at once: of the same job with calibration one is refused by name, and neither harms the other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import sparkquant
from sparkquant.errors import UsageError
from sparkquant.events import Event
from tests.cli.running import DEMO

pytest.importorskip("transformers")


def test_the_same_calibrated_job_at_once_is_refused_and_names_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would solve the same blocks in one work folder, which is kept for a run that was cut."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([[(7 * row + place) % 2000 for place in range(128)] for row in range(4)]))
    refused: list[UsageError] = []

    def again(event: Event) -> None:
        if refused or not (tmp_path / "cache" / "sparkquant").exists():
            return
        with pytest.raises(UsageError) as caught:
            sparkquant.quantize(DEMO, "qwen-hybrid-w4a16", tmp_path / "second", calibration=rows, allow=("few-tokens",))
        refused.append(caught.value)

    sparkquant.quantize(
        DEMO, "qwen-hybrid-w4a16", tmp_path / "first", calibration=rows, allow=("few-tokens",), listener=again
    )
    (error,) = refused
    assert f"is in use by process {os.getpid()}, which does the same job" in error.what
    assert error.hint == "wait for it, or stop it"
    assert (tmp_path / "first" / "config.json").exists()
    assert not (tmp_path / "second").exists()
    assert list((tmp_path / "cache" / "sparkquant").iterdir()) == []
