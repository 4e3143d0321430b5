"""Progress of long work on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparkquant.cli.shell import clean, console
from sparkquant.events import Advanced, Event, Finished, Listener, Said, Started

STEP = 0.05
"""Share of the work between two plain lines."""

QUIET_SECONDS, SILENT_SECONDS = 1.0, 20.0
"""Plain lines are never closer than the first, and never further apart than the second while work is done."""


@contextmanager
def progress() -> Iterator[Listener]:
    """A listener for `quantize` and `verify`; events may come from several threads."""
    if not sys.stderr.isatty():
        yield PlainLines()
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(binary_units=True),
        TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def listen(event: Event) -> None:
            match event:
                case Started(phase, total):
                    tasks[phase] = bar.add_task(phase, total=total or None)
                case Advanced(phase, count) if phase in tasks:
                    bar.advance(tasks[phase], count)
                case Finished(phase) if phase in tasks:
                    bar.remove_task(tasks.pop(phase))
                case Said(message):
                    bar.console.print(f"note: {clean(message)}")

        yield listen


class PlainLines:
    """`quantize  35 %  1.2 of 3.4 GiB, 4 s left`, about one per 5 %."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase = ""
        self._total = self._done = 0
        self._began = self._last = time.monotonic()
        self._shown = 0.0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        with self._lock:
            match event:
                case Started(phase, total):
                    self._phase, self._total, self._done, self._shown = phase, total, 0, 0.0
                    self._began = self._last = time.monotonic()
                case Advanced(_, count):
                    self._done += count
                    self._line()
                case Finished(phase):
                    seconds = time.monotonic() - self._began
                    from sparkquant.cli.tables import rate, size

                    self._say(f"{phase}: {size(self._done)} in {seconds:.1f} s, {rate(self._done, seconds)}")
                case Said(message):
                    self._say(f"note: {clean(message)}")

    def _line(self) -> None:
        now, share = time.monotonic(), self._done / max(1, self._total)
        waited = now - self._last
        if waited < QUIET_SECONDS or (share - self._shown < STEP and waited < SILENT_SECONDS):
            return
        from sparkquant.cli.tables import size

        self._last, self._shown = now, share
        left = (now - self._began) * (1 / share - 1) if share else 0.0
        self._say(f"{self._phase}: {share:4.0%} of {size(self._total)}, about {left:.0f} s left")

    @staticmethod
    def _say(text: str) -> None:
        try:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        except OSError:
            pass  # nobody reads the progress, or its disk is full; the work is what counts
