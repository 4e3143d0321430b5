"""Pairs of chip and kernel that are known, or were once known, to be bad: the dated table `known_bad.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import yaml

from sparkquant.engine.kernels import parse_capability
from sparkquant.marlin.noun import Noun
from sparkquant.marlin.server_log import KernelLine


class KnownBad(Noun):
    """One pair. The fields are explained in the table."""

    id: str
    what: str
    do: str
    source: str
    status: Literal["open", "fixed", "contested", "unverified"]
    date: str = ""
    capabilities: tuple[str, ...] = ()
    since: str = ""
    until: str = ""
    scheme: str = ""
    experts: bool | None = None
    families: tuple[str, ...] = ()
    kernel: str = ""
    graphs: bool = False


class Gone(Noun):
    """An environment variable that versions from `without` on do not read."""

    name: str
    without: str
    instead: str


class Table(Noun):
    """`dated` is the day of its last change, as YYYY-MM-DD."""

    dated: str
    rows: tuple[KnownBad, ...]
    gone: tuple[Gone, ...]


@functools.cache
def table() -> Table:
    """The table of this package."""
    given = yaml.safe_load((Path(__file__).parent / "known_bad.yaml").read_text(encoding="utf-8"))
    return Table.model_validate({**given, "dated": str(given["dated"])})


def version_of(text: str) -> tuple[int, int] | None:
    """`0.25.1` -> (0, 25); None for what is no version."""
    major, _, rest = text.lstrip("v").partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def known_bad(capability: str, version: str = "") -> Iterator[KnownBad]:
    """The rows for a chip and a version of vLLM. An unknown version ("") is taken to have every fault.

    ValueError for a capability that is not like 12.1.
    """
    parse_capability(capability)
    yield from (row for row in table().rows if _on(row, capability) and _in(row, version))


def concerns(row: KnownBad, kernel: KernelLine, graphs: bool) -> bool:
    """Whether a row of a chip speaks of a kernel that ran there, with or without CUDA graphs."""
    scheme = row.scheme in ("", kernel.scheme) and row.experts in (None, kernel.experts)
    family = not row.families or kernel.family in row.families
    return scheme and family and row.kernel in kernel.kernel and (graphs or not row.graphs)


def _on(row: KnownBad, capability: str) -> bool:
    return not row.capabilities or any(
        capability.startswith(known) if known.endswith(".") else capability == known for known in row.capabilities
    )


def _in(row: KnownBad, version: str) -> bool:
    number = version_of(version)
    if number is None:
        return True
    since, until = version_of(row.since), version_of(row.until)
    return (since is None or since <= number) and (until is None or number < until)


def gone(version: str) -> tuple[Gone, ...]:
    """Variables that a version does not read; all of the table for an unknown one."""
    number = version_of(version)
    return tuple(row for row in table().gone if number is None or number >= (version_of(row.without) or number))
