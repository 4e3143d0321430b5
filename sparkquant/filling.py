"""Fill one shard of the result: copy what is kept, quantize the rest by bands on all threads, or unit by unit.

By bands every thread reads rows, quantizes them and writes what they become; one more thread flushes to the disk
meanwhile. Units that cannot go so (see `sparkquant.whole_units`) follow after.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any

from sparkquant.backends import Backend, Unit
from sparkquant.backends.bands import (
    Band,
    BandBackend,
    Linear,
    bands,
    constants,
    linears,
    needs_peaks,
    peak,
    peaks_by_expert,
)
from sparkquant.decisions import Decision, Plan, source_bytes
from sparkquant.events import Advanced, Listener
from sparkquant.footprint import CHUNK_BYTES
from sparkquant.kept import copy_kept
from sparkquant.numerics.machine import thread_count
from sparkquant.shard_files import ShardFiles
from sparkquant.shard_writer import Room, ShardWriter
from sparkquant.source import Source

PHASE = "quantize"
FLUSH_BYTES = 64 * 2**20
"""Written bytes between two flushes: the disk works while more is computed, and the last fsync is short."""

_WAITING = 64
"""Jobs that may wait for a thread: enough that none is idle, few enough that an error stops the work at once."""


def units(plan: Plan, names: Sequence[str]) -> Iterator[Unit]:
    """The units of work among source tensors: quantized ones by scale group, fused experts in slices."""
    groups: dict[str, list[Decision]] = {}
    for name in names:
        decision = plan.decisions[name]
        if decision.scheme is not None:
            groups.setdefault(decision.scale_group, []).append(decision)
    for decisions in groups.values():
        first = decisions[0]
        if not first.parts:
            yield Unit(tuple(decisions))
            continue
        per_slice = max(1, CHUNK_BYTES // max(1, source_bytes(first) // first.experts))
        for start in range(0, first.experts, per_slice):
            yield Unit((first,), start, min(first.experts, start + per_slice))


def unit_bytes(unit: Unit) -> int:
    """Source bytes of a unit."""
    return sum(source_bytes(d) * (unit.last - unit.first) // d.experts for d in unit.decisions)


def fill_shard(
    plan: Plan, names: Sequence[str], source: Source, backend: Backend, writer: ShardWriter, listener: Listener
) -> None:
    """Write everything that the source tensors `names` become."""
    kept = [plan.decisions[name] for name in names if plan.decisions[name].scheme is None]
    by_band: list[Unit] = []
    whole: list[Unit] = []
    with ExitStack() as stack:
        files = stack.enter_context(ShardFiles(source.checkpoint))
        crew = stack.enter_context(_Crew(writer, listener))
        for decision in (d for d in kept if _in_files(d, source)):
            header = source.checkpoint.tensors[decision.tensor]
            crew.add([crew.submit(copy_kept, header, files, writer)], Advanced(PHASE, header.bytes, header.name))
        for unit in units(plan, names):
            fits = isinstance(backend, BandBackend) and all(_in_files(d, source) for d in unit.decisions)
            (by_band if fits and backend.takes(unit) else whole).append(unit)  # type: ignore[attr-defined]
        if isinstance(backend, BandBackend):
            _Bands(source, files, backend, writer, crew).run(by_band)
        crew.settle(0)
    live = [decision for decision in kept if not _in_files(decision, source)]
    if whole or live:
        from sparkquant.whole_units import write_whole

        write_whole(live, whole, source, backend, writer, listener)


def _in_files(decision: Decision, source: Source) -> bool:
    """Whether the tensor is stored in the source as it is to be read."""
    return decision.tensor not in source.overlay and decision.tensor not in source.checkpoint.computed


class _Crew:
    """Threads for jobs, whose events are told in the order of submission, and one thread that flushes."""

    def __init__(self, writer: ShardWriter, listener: Listener) -> None:
        self._writer, self._listener = writer, listener
        self._pool = ThreadPoolExecutor(thread_count(), thread_name_prefix="bands")
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._flush: Future[None] | None = None
        self._open: deque[tuple[list[Future[Any]], Advanced]] = deque()
        self._waiting = 0

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._flusher.shutdown(wait=True, cancel_futures=True)

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        """Start a job as soon as a thread is free."""
        return self._pool.submit(function, *arguments)

    def add(self, jobs: list[Future[Any]], event: Advanced) -> None:
        """`event` happens when all the jobs are done; wait for older ones when too many wait."""
        self._open.append((jobs, event))
        self._waiting += len(jobs)
        self.settle(_WAITING)

    def settle(self, limit: int) -> None:
        """Wait until at most `limit` jobs are unfinished (but the newest lot), raising the first failure in order."""
        while self._open and ((self._waiting > limit and len(self._open) > 1) or not limit):
            jobs, event = self._open.popleft()
            for job in jobs:
                job.result()
            self._waiting -= len(jobs)
            self._keep_flushing()
            self._listener(event)
        if not limit and self._flush is not None:
            self._flush.result()

    def _keep_flushing(self) -> None:
        if self._flush is None or self._flush.done():
            if self._flush is not None:
                self._flush.result()
            self._flush = self._flusher.submit(self._writer.flush_beyond, FLUSH_BYTES)


class _Bands:
    """Units that go by bands, one unit ahead in looking for peaks."""

    def __init__(
        self, source: Source, files: ShardFiles, backend: BandBackend, writer: ShardWriter, crew: _Crew
    ) -> None:
        self._tensors = source.checkpoint.tensors
        self._files, self._backend, self._writer, self._crew = files, backend, writer, crew
        self._memory = threading.local()

    def run(self, work: Sequence[Unit]) -> None:
        """Submit all bands of all units."""
        scans = self._scans(work[0]) if work else []
        for unit, following in zip_longest(work, work[1:]):
            peaks = peaks_by_expert((band, scan.result()) for band, scan in scans)
            scans = self._scans(following) if following else []
            jobs = [job for linear in linears(unit) for job in self._jobs(linear, peaks.get(linear.expert))]
            self._crew.add(jobs, Advanced(PHASE, unit_bytes(unit), unit.name))

    def _scans(self, unit: Unit) -> list[tuple[Band, Future[float]]]:
        if not needs_peaks(unit):
            return []
        return [(band, self._crew.submit(self._peak, band)) for linear in linears(unit) for band in bands(linear)]

    def _jobs(self, linear: Linear, peak: float | None) -> Iterator[Future[None]]:
        outputs = linear.scheme.outputs((linear.rows, linear.columns))
        rooms = {t.name: self._writer.room(f"{linear.module}.{t.name}", t.dtype, t.shape) for t in outputs}
        for suffix, data in constants(linear, peak):
            rooms[suffix].write(0, memoryview(data))
        for band in bands(linear):
            yield self._crew.submit(self._encode, band, rooms, peak)

    def _peak(self, band: Band) -> float:
        return peak(band, self._read(band))

    def _encode(self, band: Band, rooms: dict[str, Room], peak: float | None) -> None:
        for suffix, offset, data in self._backend.encode(band, self._read(band), peak):
            rooms[suffix].write(offset, data)

    def _read(self, band: Band) -> memoryview:
        """The band's bytes, in memory that its thread uses again: fresh pages cost as much as reading them."""
        held: bytearray = getattr(self._memory, "held", bytearray())
        if len(held) < band.bytes:
            held = self._memory.held = bytearray(band.bytes)
        view = memoryview(held)[: band.bytes]
        self._files.fill(self._tensors[band.linear.decision.tensor], band.offset, view)
        return view
