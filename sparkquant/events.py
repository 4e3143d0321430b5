"""What long work tells its caller: events instead of prints. The command line turns them into a bar or plain lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Started:
    """A phase begins; `total_bytes` of source data will be read in it."""

    phase: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """`bytes` more of the source are done (not a running total); `what` is the tensor or group just finished."""

    phase: str
    bytes: int
    what: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The phase is over."""

    phase: str


@dataclass(frozen=True, slots=True)
class Said:
    """Something that a person should read once: resumed shards, a note of the plan."""

    message: str


Event = Started | Advanced | Finished | Said
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of callers that do not care."""
