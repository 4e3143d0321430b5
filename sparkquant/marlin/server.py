"""A vLLM server as a process of its own: started, watched, logged to a file, and ended with everything it started.

    with Server(Launch(command, arguments, environment, log)) as server:
        server.wait_ready(600)
        Client(server.url)

vLLM is never imported. A keeper process (keeper.py) stands between us and the server: when we end, in whatever way, it
ends the server and all of its descendants.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx

from sparkquant.errors import EnvironmentMissing, UsageError

GRACE = 20.0
"""Seconds between SIGTERM and SIGKILL; vLLM 0.25.1 ends in about two."""
START_LIMIT = 1800.0
"""Seconds for a start: a first one compiles kernels for minutes, a large model is read for minutes."""
POLL = 0.2
SETTLE = 2.0
"""Seconds that a process that crashes may take to end with all of its children."""
VERSION_LIMIT = 180

MODULE = ("-m", "vllm.entrypoints.cli.main")
_VERSION = re.compile(r"\b(\d+\.\d+(?:\.\d+)?\S*)")
_ASK = "from importlib.metadata import version; print(version('vllm'))"

_ports: set[int] = set()
_ports_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start. `arguments` follow `serve`; `environment` is added to ours."""

    command: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    folder: Path | None = None

    def words(self, port: int) -> list[str]:
        """The whole command line."""
        return [*self.command, "serve", *self.arguments, "--host", "127.0.0.1", "--port", str(port)]


@dataclass
class Server:
    """One server process. Use it as a context: leaving it ends every process."""

    launch: Launch
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    started: float = 0.0

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """The server's command has not ended."""
        return self.process is not None and self.process.poll() is None

    def survives(self, seconds: float = SETTLE) -> bool:
        """Whether it still runs a moment after a request failed: a crash breaks connections before it is over."""
        process = self.process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        return self.alive

    def __enter__(self) -> Server:
        self.port = free_port()
        self.launch.log.parent.mkdir(parents=True, exist_ok=True)
        keeper = [sys.executable, "-I", str(Path(__file__).with_name("keeper.py")), str(GRACE)]
        environment = {**os.environ, **self.launch.environment}
        with self.launch.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*keeper, *self.launch.words(self.port)], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True, cwd=self.launch.folder,
            )  # fmt: skip
        self.started = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def wait_ready(self, limit: float = START_LIMIT) -> str:
        """Wait until it answers; "" then, otherwise why it does not: it ended, or `limit` seconds are over."""
        until = time.monotonic() + limit
        with httpx.Client(timeout=5.0, trust_env=False, verify=False) as client:
            while time.monotonic() < until:
                if self.process is None or self.process.poll() is not None:
                    code = "unknown" if self.process is None else self.process.returncode
                    return f"it ended with exit code {code} before it answered"
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return ""
                time.sleep(POLL)
        return f"it did not answer within {limit:.0f} s"

    def stop(self) -> None:
        """End it and everything it started; returns when all are gone."""
        process, self.process = self.process, None
        if process is None:
            return
        try:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()  # what the keeper waits for
            process.wait(GRACE + 40)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)  # the server's command has asked to die with its keeper
            process.wait()
        except BaseException:  # a second Ctrl-C: no waiting
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            raise
        finally:
            with _ports_lock:
                _ports.discard(self.port)


def free_port() -> int:
    """A port that nobody listens on now, and that was not handed out to a server that still runs."""
    with _ports_lock:
        for _ in range(100):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            if port not in _ports:
                _ports.add(port)
                return port
    raise EnvironmentMissing("no free port on 127.0.0.1", hint="end some of the servers on this machine")


def command_of(vllm: str | None) -> tuple[str, ...]:
    """`--vllm` as words: a `vllm` executable, a Python interpreter, or a command; the `vllm` on PATH by default.

    Raises EnvironmentMissing when there is no such program.
    """
    text = vllm or "vllm"
    words = [text] if Path(text).expanduser().exists() else shlex.split(text)
    if not words:
        raise UsageError("--vllm is empty", hint="pass a `vllm` executable, a Python interpreter or a command")
    program = shutil.which(str(Path(words[0]).expanduser()))
    if program is None:
        what = f"{words[0]}: no such program" if vllm else "no `vllm` on PATH"
        raise EnvironmentMissing(what, hint="pass --vllm PATH: a `vllm` executable, or the Python it is installed in")
    if len(words) == 1 and _is_python(program):
        return (program, *MODULE)
    return (program, *words[1:])


OWN = {
    "--port": "the servers get free ports", "--host": "the servers listen on 127.0.0.1",
    "--served-model-name": "the servers are asked by a name of our own",
    "--tensor-parallel-size": "pass --tp, by which the kernels are judged, too", "-tp": "pass --tp",
    "--api-key": "set VLLM_API_KEY, which servers and questions share",
}  # fmt: skip
"""Options of `vllm serve` that are not the user's to set here."""


def require_own_words(words: Sequence[str]) -> None:
    """UsageError for words of `--vllm-arg` that take away what a run relies on."""
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if option in OWN:
            raise UsageError(f"--vllm-arg {word}: {OWN[option]}", hint="leave it out")


def require_share(memory: float) -> None:
    """UsageError unless it is a share of the GPU's memory."""
    if not 0 < memory <= 1:
        raise UsageError(f"memory is {memory}", hint="pass a share, like 0.85")


def version_of(command: tuple[str, ...]) -> str:
    """The version that a command would start. Raises EnvironmentMissing when it cannot say."""
    python = _is_python(command[0]) and command[1:3] == MODULE
    ask = [command[0], "-c", _ASK] if python else [*command, "--version"]
    try:
        done = subprocess.run(
            ask, capture_output=True, text=True, timeout=VERSION_LIMIT, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentMissing(
            f"{shlex.join(ask)}: {type(error).__name__}", hint="sparkquant doctor says what is installed"
        ) from None
    found = _VERSION.search(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "")
    if not done.returncode and found is not None:
        return found[1]
    if not python and (known := _by_its_files(command[0])):
        return known  # it cannot be imported: its servers will say why, in logs that are judged
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    raise EnvironmentMissing(
        f"{shlex.join(ask)}: {last}", hint="sparkquant doctor says which vLLM is installed, and what is missing"
    )


def _by_its_files(program: str) -> str:
    """The version of the vLLM that a script belongs to; "" where it is none."""
    from sparkquant.marlin.installation import find_vllm

    if not Path(program).name.startswith("vllm"):
        return ""
    with contextlib.suppress(EnvironmentMissing):
        found = find_vllm(program)
        return found.version if found is not None else ""
    return ""


def _is_python(program: str) -> bool:
    return re.fullmatch(r"python[\d.]*", Path(program).name) is not None
