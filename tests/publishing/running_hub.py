"""The hub of the tests as a process, and the environment in which the real client talks to it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.running import ROOT, spawn
from tests.publishing.hub_server import WRITER


@dataclass(frozen=True)
class RunningHub:
    """A hub that listens at `address`; `home` is where the client keeps its cache."""

    address: str
    home: Path

    def environment(self, token: str | None = WRITER) -> dict[str, str]:
        """Variables for a client process; large files go by LFS, which the server speaks."""
        found = {
            "HF_ENDPOINT": self.address, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*", "no_proxy": "*",
        }  # fmt: skip
        return {**found, **({"HF_TOKEN": token} if token else {"HF_TOKEN": ""})}

    def run(self, *arguments: object, token: str | None = WRITER, cwd: Path | None = None) -> Any:
        """`sparkquant ...` as a process that talks to this hub."""
        return spawn(*arguments, env=self.environment(token), cwd=cwd)

    def control(self, what: str, body: Any = None) -> Any:
        """What the server knows, or what it shall do."""
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"{self.address}/_control/{what}", data) as answer:
            return json.load(answer)

    def get(self, path: str) -> Any:
        """A document of the public interface."""
        asked = urllib.request.Request(f"{self.address}{path}", headers={"Authorization": f"Bearer {WRITER}"})
        with urllib.request.urlopen(asked) as answer:
            raw = answer.read()
        return json.loads(raw) if path.startswith("/api/") else raw

    def requests(self, pattern: str = "") -> list[list[Any]]:
        """Requests so far whose path contains `pattern`."""
        return [entry for entry in self.control("log") if pattern in entry[1]]


@contextmanager
def running_hub(folder: Path) -> Iterator[RunningHub]:
    """Start a hub of its own, and end it."""
    ready = folder / "address"
    process = subprocess.Popen([sys.executable, "-m", "tests.publishing.hub_server", str(ready)], cwd=ROOT)
    try:
        limit = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.02)
        yield RunningHub(ready.read_text(), folder / "home")
    finally:
        process.terminate()
        process.wait(10)
