"""What every verb shares: streams, exit codes, and the spelling of sizes on the command line."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from sparkquant.errors import Problem, Resumable, SparkquantError, UsageError
from sparkquant.printable import clean as clean

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

INTERRUPTED = 130
BROKEN_PIPE = 141
"""128 + SIGPIPE: what a shell reports of a program whose reader went away."""

PIECE = 16384
"""Characters written at once; a pipe holds at least as many bytes."""

MIN_WIDTH = 80
"""Tables are never squeezed below this: a narrower terminal breaks lines, but no number and no name is cut."""


class Verbs(TyperGroup):
    """Turns errors into exit codes: message and hint on stderr, a traceback for bugs alone."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen verb."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the shell
                setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (as long as the process)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a name that the locale cannot show is no reason to die
        with _interrupts() as interrupts:
            try:
                value = super().invoke(ctx)
                sys.stdout.flush()
                return value
            except SparkquantError as error:
                if error.exit_code == 1:
                    raise
                _complain(_told(error))
                raise typer.Exit(error.exit_code) from None
            except BrokenPipeError:
                _silence(sys.stdout)
                raise typer.Exit(BROKEN_PIPE) from None
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                _silence(sys.stdout)
                full = error.filename or "what is printed, or kept while working"
                _complain(f"no space left for {full}\nhint: free some, and run the same command again")
                raise typer.Exit(Resumable.exit_code) from None
            except (KeyboardInterrupt, Exception) as error:
                if isinstance(error, typer.Exit) or not (interrupts or isinstance(error, KeyboardInterrupt)):
                    raise
                resumable = ctx.invoked_subcommand in ("quantize", "publish")
                _complain("interrupted" + ("\nhint: the same command goes on where it stopped" if resumable else ""))
                raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C as usual, and a list that tells whether it came.

    A library that is interrupted half-way through its import may turn the interrupt into any other exception.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield came  # an outer verb listens already, or the shell told this process to ignore Ctrl-C
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _told(error: SparkquantError) -> str:
    """An error as `str` gives it, every part of it clean."""
    parts = [Problem(clean(p.where), clean(p.what), clean(p.hint)) for p in error.problems]
    what = "\n".join(map(clean, error.what.split("\n")))
    return str(type(error)(what, hint=clean(error.hint), problems=parts))


def _complain(text: str) -> None:
    try:
        console(sys.stderr).print(f"error: {text}", style="red", soft_wrap=True)
        sys.stderr.flush()
    except OSError:  # nobody reads it, or its disk is full
        _silence(sys.stderr)


def _silence(stream: IO[str]) -> None:
    """Point a stream whose reader is gone at nothing, so that the last flush does not complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def console(stream: IO[str]) -> Console:
    """A console on a stream: colours on a terminal only, text as it is (no markup, no highlighting)."""
    from rich.console import Console

    # rich keeps bold under NO_COLOR; people who set it want plain text.
    system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    plain = Console(file=stream, markup=False, highlight=False, emoji=False, color_system=system)
    plain.width = max(MIN_WIDTH, plain.width)
    return plain


class _Clean:
    """A renderable with everything but its own colours and line ends spelled out: the last net under `clean`."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Its segments."""
        from rich.segment import Segment

        for text, style, control in screen.render(self._inner, options):
            yield Segment(text if control else "\n".join(map(clean, text.split("\n"))), style, control)


def show(renderables: Iterable[RenderableType], *, soft_wrap: bool = False) -> None:
    """Results on stdout; lines end without padding where they are piped."""
    screen = console(sys.stdout)
    with screen.capture() as captured:
        for renderable in renderables:
            screen.print(_Clean(renderable), soft_wrap=soft_wrap)
    text = captured.get()
    write(text if screen.is_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def write(text: str) -> None:
    """A document on stdout, byte for byte."""
    # In pieces: unbuffered streams (PYTHONUNBUFFERED) do not notice that a pipe took only a part of a long text.
    for start in range(0, len(text), PIECE):
        sys.stdout.write(text[start : start + PIECE])


def write_json(text: str) -> None:
    """JSON on stdout. What does not print stands in strings alone, where an escape means the same."""
    write(text if text.isprintable() else _UNPRINTABLE.sub(_escaped, text))


_UNPRINTABLE = re.compile(r"[^\x20-\x7e\n]")


def _escaped(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


def stop(code: int) -> NoReturn:
    """End with an exit code after the result has been printed."""
    raise typer.Exit(code)


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """`5GB`, `500MiB` or plain bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{text!r} is no size", hint="write it like 5GB, 500MiB or 1000000")
    return int(float(match.group(1)) * unit)


def parse_ranks(text: str) -> tuple[int, ...]:
    """`1,2` -> (1, 2): tensor-parallel sizes."""
    if not text.strip():
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,2}", part, re.ASCII) for part in parts):
        raise UsageError(f"--tp {text!r} is no list of tensor-parallel sizes", hint="write it like 1,2")
    return tuple(dict.fromkeys(int(part) for part in parts))
