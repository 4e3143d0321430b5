"""Units as whole tensors in memory: one unit ahead in reading and one behind in writing.

This is how everything goes that is not by bands: calibrated and other backends, weights of a live model or dequantized
from a quantized source, and machines without numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from sparkquant.backends import Backend, Unit
from sparkquant.backends.planned import not_finite
from sparkquant.decisions import Decision, source_bytes
from sparkquant.events import Advanced, Listener
from sparkquant.reading import DTYPE_NAMES, ShardReader, raw_bytes
from sparkquant.shard_writer import ShardWriter
from sparkquant.source import Source

FLUSH_BYTES = 256 * 2**20
"""Written bytes between two flushes: the disk works while the next unit is computed, and the last fsync is short."""


def write_whole(
    kept: Sequence[Decision],
    work: Sequence[Unit],
    source: Source,
    backend: Backend,
    writer: ShardWriter,
    listener: Listener,
) -> None:
    """Store the tensors of `kept` that no file holds as they are, and what the units of `work` become."""
    with ExitStack() as stack:
        reader = stack.enter_context(ShardReader(source.checkpoint))
        ahead = stack.enter_context(_Worker())
        behind = stack.enter_context(_Worker())
        for decision in kept:
            behind.submit(_keep, decision, source, reader, writer, listener)
        buffers = [_Buffer(), _Buffer()]
        pending = ahead.submit(_weights, work[0], source, reader, backend, buffers[0]) if work else None
        for index, unit in enumerate(work):
            weights = pending.result() if pending else {}
            pending = None
            following = work[index + 1] if index + 1 < len(work) else None
            if following:
                pending = ahead.submit(_weights, following, source, reader, backend, buffers[(index + 1) % 2])
            stored = list(backend.quantize(unit, weights))
            behind.join()
            behind.submit(_put, stored, writer)
            size = sum(source_bytes(d) * (unit.last - unit.first) // d.experts for d in unit.decisions)
            listener(Advanced("quantize", size, unit.name))
        behind.join()


class _Worker:
    """One background thread whose failures surface at the next `join`; nothing is left running on the way out."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._open: list[Future[Any]] = []

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = self._pool.submit(function, *arguments)
        self._open.append(future)
        return future

    def join(self) -> None:
        """Wait for everything submitted, and raise the first failure."""
        for future in self._open:
            future.result()
        self._open.clear()


class _Buffer:
    """Memory that is used again for every other unit: touching fresh pages costs as much as reading them."""

    def __init__(self) -> None:
        self._raw = torch.empty(0, dtype=torch.uint8)

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        aligned = [-(-size // 64) * 64 for size in sizes]
        if self._raw.numel() < sum(aligned):
            self._raw = torch.empty(0, dtype=torch.uint8)
            self._raw = torch.empty(sum(aligned), dtype=torch.uint8)
        return list(torch.split(self._raw[: sum(aligned)], aligned))


def _weights(unit: Unit, source: Source, reader: ShardReader, backend: Backend, buffer: _Buffer) -> dict[str, Tensor]:
    """Read a unit's tensors (from the live overlay where it has them), if the backend needs them."""
    if not backend.reads(unit):
        return {}
    from_files = [d for d in unit.decisions if d.tensor not in source.overlay]
    sizes = [source_bytes(d) * (unit.last - unit.first) // d.experts for d in from_files]
    weights: dict[str, Tensor] = {}
    for decision, raw in zip(from_files, buffer.take(sizes), strict=True):
        span = {"first": unit.first, "last": unit.last} if decision.parts else {}
        weights[decision.tensor] = reader.read(decision.tensor, buffer=raw, **span)
    for decision in unit.decisions:
        if decision.tensor in source.overlay:
            value = source.overlay[decision.tensor]
            weights[decision.tensor] = value[unit.first : unit.last] if decision.parts else value
    return weights


def _put(stored: Sequence[tuple[str, Tensor]], writer: ShardWriter) -> None:
    for name, tensor in stored:
        writer.put(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), raw_bytes(tensor))
    writer.flush_beyond(FLUSH_BYTES)


def _keep(decision: Decision, source: Source, reader: ShardReader, writer: ShardWriter, listener: Listener) -> None:
    """Store a live value, or what a quantized source stands for as BF16."""
    live = source.overlay.get(decision.tensor)
    if live is not None:
        bad = (~live.isfinite()).nonzero()[:1].tolist() if live.is_floating_point() else []
        if bad:
            raise not_finite(decision.tensor, bad[0], float(live[tuple(bad[0])]))
        writer.put(decision.tensor, decision.dtype, decision.shape, raw_bytes(live))
    else:
        writer.put(decision.tensor, "BF16", decision.shape, raw_bytes(reader.read(decision.tensor).to(torch.bfloat16)))
    writer.flush_beyond(FLUSH_BYTES)
    listener(Advanced("quantize", source_bytes(decision), decision.tensor))
