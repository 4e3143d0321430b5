"""Make several runs, each with a fresh server, some at once where asked; nothing is left behind, whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from sparkquant.events import Listener, Said
from sparkquant.marlin.client import Client
from sparkquant.marlin.controls import SERVED, Bench, Observation, Role, Task, questions
from sparkquant.marlin.log import read_log_file
from sparkquant.marlin.server import Launch, Server

Asked = Mapping[str, Any]
"""What the questions gave, as fields of an observation."""
After = Callable[[Client, Server, Asked], None]


@dataclass
class Fleet:
    """Servers that run now. `closing` is set when everything has to end."""

    bench: Bench
    listener: Listener
    servers: list[Server] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    def observe(self, task: Task, after: After | None = None) -> Observation:
        """Start a fresh server, ask everything, end it. `after` is called before the end (a soak)."""
        bench = self.bench
        arguments = (task.model, *bench.base, "--served-model-name", SERVED, *task.settings.arguments, *bench.extra)
        launch = Launch(
            bench.command, arguments, {"VLLM_NO_USAGE_STATS": "1", **task.settings.environment},
            bench.logs / f"{task.role}.log",
        )  # fmt: skip
        if self.closing.is_set():
            return Observation(task.role, task.settings, None, "it was not started: the run is being ended")
        server = Server(launch)
        self.servers.append(server)
        with server:
            failed = "the run is being ended" if self.closing.is_set() else server.wait_ready(bench.start_limit)
            seen: dict[str, Any] = {} if failed else self._asked(task, server, after)
        return Observation(task.role, task.settings, read_log_file(launch.log), failed, **seen)

    def _asked(self, task: Task, server: Server, after: After | None) -> dict[str, Any]:
        started = time.monotonic() - server.started
        self.listener(Said(f"{task.role}: answers after {started:.0f} s"))
        with Client(server.url, model=SERVED, limit=self.bench.answer_limit) as client:
            seen = questions(client, self.bench.prompts, task.concurrencies, self.bench.max_tokens)
            if after is not None:
                after(client, server, seen)
        failed = any(answer.error for answers in seen["answers"].values() for answer in answers)
        alive = server.survives() if failed else server.alive
        died = "" if alive else "the server ended while it was asked"
        return {**seen, "seconds": started, "died": died}

    def end(self) -> None:
        """End every server now."""
        self.closing.set()
        for server in self.servers:
            server.stop()


def run_all(
    tasks: Sequence[Task], bench: Bench, *, parallel: int, listener: Listener, after: After | None = None
) -> dict[Role, Observation]:
    """Observations by role. When the candidate does not start, what has not begun is left out.

    parallel  servers at once: each takes its share of memory
    after     called with the candidate's server before it ends
    """
    fleet = Fleet(bench, listener)
    found: dict[Role, Observation] = {}
    with ThreadPoolExecutor(parallel, thread_name_prefix="run") as pool:
        try:
            for number, run in enumerate(_as_they_end(pool, fleet, tasks, after)):
                found[run.role] = run
                told = run.failed or run.died or "done"
                listener(Said(f"{run.role}, {number + 1} of {len(tasks)} runs: {told}"))
                if run.role is Role.CANDIDATE and run.failed:
                    fleet.end()
        except BaseException:
            fleet.end()
            raise
    return {task.role: found[task.role] for task in tasks if task.role in found and not _left_out(found[task.role])}


def _left_out(run: Observation) -> bool:
    return run.log is None or "being ended" in run.failed


def _as_they_end(
    pool: ThreadPoolExecutor, fleet: Fleet, tasks: Sequence[Task], after: After | None
) -> Iterator[Observation]:
    futures: list[Future[Observation]] = [
        pool.submit(fleet.observe, task, after if task.role is Role.CANDIDATE else None) for task in tasks
    ]
    try:
        for future in as_completed(futures):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()
