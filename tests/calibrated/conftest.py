"""Rows of ids, a private cache for work folders, and one thread: small matrices do not deserve two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sparkquant"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """32 rows of up to 48 random ids, of several lengths."""
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (48, 48, 31, 17) * 8]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(made))
    return path
