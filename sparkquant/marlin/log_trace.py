"""Faults of a log: tracebacks read frame by frame, and single lines that speak of an end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from sparkquant.marlin.log_faults import DEAD, EXCEPTION, FAULTS, FRAME, LIBRARIES, TERMINATED
from sparkquant.marlin.log_lines import Line
from sparkquant.marlin.server_log import Fault, Phase
from sparkquant.marlin.verdict import Outcome

MAX_FAULTS = 100
MAX_TEXT = 400
CONTINUED = 6
"""Lines after an exception that may still belong to its message."""

UNKNOWN = Line(
    "exception", re.compile(""), Outcome.INCONCLUSIVE, "an error that this version of the table does not know", ""
)
GONE = Line("dead", re.compile(""), Outcome.INCONCLUSIVE, "the engine ended; the cause is in no line that is known", "")
ENGINE_FILES = re.compile(
    r"(?:^|/)(?:core|core_client|async_llm|llm_engine|multiproc_executor|uniproc_executor|ray_\w+|gpu_worker|launcher)\.py"
)
"""Errors that these files log end the engine; an error of another file while serving may be one request's."""
QUIET = ("DEBUG", "INFO", "WARNING")


@dataclass
class Trace:
    """Collects faults line by line. Lines come without process prefix; `level` is "" where there was no header."""

    found: list[Fault] = field(default_factory=list)
    dead: tuple[int, str, Phase] | None = None
    _frames: list[tuple[str, str, str]] = field(default_factory=list)
    _open: bool = False
    _request: bool = False
    _since: int = -1

    def expects(self, text: str, number: int) -> bool:
        """Whether a line without the name of its process may belong to the message of this one's exception."""
        return 0 <= number - self._since <= CONTINUED and self._since >= 0 and not EXCEPTION.match(text)

    def feed(self, message: str, level: str, file: str, phase: Phase, number: int) -> None:
        """One line."""
        if message.startswith("Traceback (most recent call last)"):
            self._frames, self._open = [], True
            return
        if frame := FRAME.match(message):
            if self._open:
                self._frames.append((frame[1], frame[2], frame[3]))
            return
        if DEAD.search(message) and level not in QUIET:
            self.dead = self.dead or (number, message[:MAX_TEXT], phase)
        if not level and "Exception in ASGI application" in message:
            self._request = True
        exception = EXCEPTION.match(message)
        if exception and (self._open or not level or level == "ERROR"):
            self._exception(message, level, file, phase, number)
        elif (not level and TERMINATED.search(message)) or (level in ("ERROR", "CRITICAL") and not self._open):
            if line := _known(message):
                self._add(line, message, self._fatal(line, level, file, phase), phase, number, "")
        elif 0 <= number - self._since <= CONTINUED:
            self._continue(message)

    def _exception(self, message: str, level: str, file: str, phase: Phase, number: int) -> None:
        line = _known(message) or UNKNOWN
        if line is UNKNOWN and DEAD.search(message):
            self._open = False
            return
        fatal = self._fatal(line, level, file, phase)
        self._add(line, message, fatal, phase, number, self._place())
        self._since = number if line is UNKNOWN else -1
        self._open = self._request = False

    def _fatal(self, line: Line, level: str, file: str, phase: Phase) -> bool:
        """Whether the engine ended with it, and not a warm-up that goes on without, or one request."""
        if level in QUIET:
            return False
        if phase is Phase.SHUTDOWN:
            # What a teardown meets is its own doing. But launches are asynchronous: a kernel's fault may show so late.
            return line.points is Outcome.KERNEL_FAULT
        if phase is not Phase.SERVING or line.points is Outcome.KERNEL_FAULT:
            return True
        return not self._request if not level else bool(ENGINE_FILES.search(file))

    def _place(self) -> str:
        """The deepest frame in which something can be wrong."""
        for file, number, name in reversed(self._frames):
            if not LIBRARIES.search(file):
                start = max(file.rfind("/vllm/"), file.rfind("/sglang/"))
                return f"{file[start + 1 :]}:{number} in {name}"
        return ""

    def _add(self, line: Line, text: str, fatal: bool, phase: Phase, number: int, at: str) -> None:
        text = text[:MAX_TEXT]
        for i, known in enumerate(self.found):
            if (known.id, known.text) == (line.id, text) and (known.fatal or not fatal):
                if at and not known.at:
                    self.found[i] = known.model_copy(update={"at": at})
                return
        if len(self.found) < MAX_FAULTS:
            points = line.points or Outcome.INCONCLUSIVE
            self.found.append(
                Fault(
                    id=line.id,
                    points=points,
                    meaning=line.meaning,
                    phase=phase,
                    fatal=fatal,
                    at=at,
                    line=number,
                    text=text,
                )
            )

    def _continue(self, message: str) -> None:
        """The message of an unknown exception goes on over several lines: one of them may say what it is."""
        line = _known(message)
        if line is None or not self.found or self.found[-1].id != UNKNOWN.id:
            return
        last = self.found[-1]
        told = {
            "id": line.id,
            "points": line.points,
            "meaning": line.meaning,
            "text": f"{last.text} {message.strip()}"[:MAX_TEXT],
        }
        self.found[-1] = last.model_copy(update=told)
        self._since = -1


def merged(traces: Iterable[Trace], *, stopped: bool) -> tuple[Fault, ...]:
    """Faults of all processes, in order, each of them once; the end of the engine alone where no line says why.

    stopped  the API server was told to end. Then its engine ends too, and now and then vLLM's own client is still
             waiting for it: `EngineDeadError` after the signal (4 of 29 recorded runs) is no fault
    """
    traces = list(traces)
    found: dict[tuple[str, str, bool], Fault] = {}
    for fault in sorted((fault for trace in traces for fault in trace.found), key=lambda fault: fault.line):
        known = found.setdefault((fault.id, fault.text, fault.fatal), fault)
        if fault.at and not known.at:
            found[fault.id, fault.text, fault.fatal] = known.model_copy(update={"at": fault.at})
    faults = tuple(found.values())[:MAX_FAULTS]
    dead = min((trace.dead for trace in traces if trace.dead is not None), default=None)
    ended = stopped and dead is not None and dead[2] is Phase.SHUTDOWN
    if dead is None or ended or any(fault.fatal for fault in faults):
        return faults
    number, text, phase = dead
    end = Fault(id=GONE.id, points=Outcome.INCONCLUSIVE, meaning=GONE.meaning, phase=phase, fatal=True, at="",
                line=number, text=text)  # fmt: skip
    return (*faults, end)


def _known(message: str) -> Line | None:
    return next((line for line in FAULTS if line.pattern.search(message)), None)
