"""Calibrated quantization, block by block: rows in, stored tensors out, into a private work folder.

A block is solved in stages (mixer inputs, mixer output, MLP, its end): a pass of the rows through what is quantized so
far fills the Hessians of a stage, its matrices are solved, and at last the rows move behind the block. Nothing larger
than a block, its statistics and a batch of rows is in memory. Each finished block is durable, so a killed run goes on
behind it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from sparkquant.backends.solving import Knowledge
from sparkquant.blocksolver import BlockRecord, BlockSolver
from sparkquant.decisions import Decision, Plan, source_bytes
from sparkquant.errors import CalibrationError
from sparkquant.events import Advanced, Finished, Listener, Said, Started
from sparkquant.layers import LayerClass
from sparkquant.live import live_view
from sparkquant.memory import batch_tokens
from sparkquant.numerics.hessian import Energy, Hessian
from sparkquant.passes import LAST, PROBE, Passes, ends_a_module, stage_of, stages
from sparkquant.rowstore import RowStore
from sparkquant.statistics import Collector, sites, statistic
from sparkquant.stream import Batch, StreamedModel, group_rows
from sparkquant.weights import StoredWeights

MAX_EXCLUDED = 0.1
"""Share of rows that may turn non-finite before the run is given up."""

STATE = "state.json"


@dataclass
class Progress:
    """The durable state: how many blocks are done, which rows were excluded, and the records."""

    blocks: int = 0
    finished: bool = False
    excluded: list[int] = field(default_factory=list)
    records: list[BlockRecord] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path) -> Progress:
        """The state of an interrupted run, or a fresh one."""
        try:
            fields = json.loads((folder / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls()
        return cls(**{**fields, "records": [BlockRecord(**record) for record in fields["records"]]})

    def save(self, folder: Path) -> None:
        """Replace the state in one step."""
        staged = folder / f"{STATE}.new"
        with staged.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(folder / STATE)


class Blockwise:
    """One calibrated run. `folder` is private to the user and belongs to this job alone."""

    def __init__(
        self,
        plan: Plan,
        weights: StoredWeights,
        model: StreamedModel,
        rows: Sequence[Sequence[int]],
        folder: Path,
        *,
        listener: Listener,
        spill: bool = False,
    ) -> None:
        self._plan, self._weights, self._model = plan, weights, model
        self._rows, self._folder = rows, folder
        self._listener, self._spill = listener, spill
        self._shapes: list[tuple[int, int]] = []
        method = plan.recipe.method
        self._streams = ("quantized", "full") if method.correction > 0 and method.name == "gptq" else ("quantized",)
        self._layers: dict[int | None, list[Decision]] = {}
        for decision in plan.decisions.values():
            if decision.scheme is not None and decision.layer_class is not LayerClass.MTP:
                self._layers.setdefault(decision.layer, []).append(decision)
        self.progress = Progress.load(folder)

    def run(self) -> None:
        """Quantize every block that is not done, then lm_head."""
        batches, store = self._start()
        self._exclude(batches, self.progress.excluded)
        sizes = [sum(map(source_bytes, self._layers.get(index, []))) for index in (*range(self._model.depth), None)]
        self._listener(Started("calibrate", sum(sizes)))
        for index in range(self._model.depth):
            if index >= self.progress.blocks:
                self._block(index, batches, store)
            self._listener(Advanced("calibrate", sizes[index], f"block {index}"))
        if not self.progress.finished:
            self._head(batches, store)
        self._listener(Advanced("calibrate", sizes[-1], "lm_head"))
        self._listener(Finished("calibrate"))

    def _start(self) -> tuple[list[Batch], RowStore]:
        """The batches, and what is in front of the first block that is not done."""
        model = self._model
        tokens = batch_tokens(str(model.device))
        lengths = [len(row) for row in self._rows]
        self._shapes = [(len(group), max(lengths[i] for i in group)) for group in group_rows(lengths, tokens=tokens)]
        store = RowStore(self._folder, self._shapes, model.width, model.dtype, self._streams)
        batches = []
        for number, batch in enumerate(model.embed(self._rows, tokens=tokens)):
            if self.progress.blocks == 0:
                for stream in self._streams:
                    store.write(0, stream, number, batch.hidden)
            batches.append(batch.without_states())  # all rows at once would be too much
        if self.progress.blocks:
            self._listener(Said(f"resuming: {self.progress.blocks} of {model.depth} blocks are done already"))
        return batches, store

    def _block(self, index: int, batches: Sequence[Batch], store: RowStore) -> None:
        started = time.monotonic()
        record = BlockRecord(index, 0.0, 0.0, 0.0)
        stored: dict[str, Tensor] = {}
        with self._model.block(index) as block, torch.no_grad():
            prefix = self._model.block_prefix(index)
            live = {f"{prefix}.{name}": parameter for name, parameter in block.named_parameters()}
            solver = BlockSolver(self._plan, self._weights, live, self._model.device, record)
            passes = self._passes(block, index, live, store)
            for stage in stages(sites(block, prefix, self._layers.get(index, []), self._plan.layout)):
                collector = Collector(stage.sites, self._statistic)
                with collector.collecting():
                    for number, batch in enumerate(batches):
                        collector.batch(batch.valid)
                        for stream in self._streams:
                            self._run(passes, solver, store, stream, number, rank=stage.rank)
                        collector.add()
                        broken = collector.broken.tolist()
                        self._exclude(batches, [row for row, bad in zip(batch.rows, broken, strict=True) if bad])
                keep = "full" in self._streams
                stored.update(solver.solve(stage.sites, collector, keep_source=keep))
            self._advance(passes, solver, batches, store)
        record.close(solver.errors, time.monotonic() - started)
        store.sync(index + 1)
        self._finish(f"block-{index:05d}.pt", stored, record)
        self.progress.blocks = index + 1
        self.progress.save(self._folder)
        if stored:
            self._listener(Said(_line(f"block {index}", record)))

    def _passes(self, block: nn.Module, index: int, live: Mapping[str, Tensor], store: RowStore) -> Passes:
        """Modules that end with a Linear are found where the layer has a projection back to the states."""
        prefix = self._model.block_prefix(index)
        ends: dict[str, int] = {}
        for decision in self._plan.decisions.values():
            if decision.layer == index and ends_a_module(decision.layer_class, self._model.device):
                key, _ = live_view(decision.tensor, live, self._plan.layout)
                if key is not None and key.endswith(".weight"):
                    path = key.removeprefix(f"{prefix}.").removesuffix(".weight")
                    ends[path] = stage_of(decision.layer_class)
        probe = store.read(index, "quantized", 0)[:1, :PROBE].to(self._model.device)
        return Passes(self._model, block, index, dict(sorted(ends.items())), self._folder, self._shapes, probe)

    def _run(
        self, passes: Passes, solver: BlockSolver, store: RowStore, stream: str, number: int, *, rank: int
    ) -> Tensor | None:
        states = store.read(self.progress.blocks, stream, number).to(self._model.device)
        with solver.source_weights() if stream == "full" else nullcontext():
            return passes.run(stream, number, states, rank=rank)

    def _advance(self, passes: Passes, solver: BlockSolver, batches: Sequence[Batch], store: RowStore) -> None:
        """Every stream behind the block, through the weights that are its own."""
        for number, batch in enumerate(batches):
            behind = []
            for stream in self._streams:
                states = self._run(passes, solver, store, stream, number, rank=LAST)
                if states is None:
                    raise RuntimeError("a pass stopped with no hook in place")
                store.write(self.progress.blocks + 1, stream, number, states)
                behind.append(states)
            self._exclude(batches, self._broken(batch, behind))

    def _head(self, batches: Sequence[Batch], store: RowStore) -> None:
        """lm_head, whose inputs are the normalized states behind the last block."""
        started, depth = time.monotonic(), self._model.depth
        record = BlockRecord(None, 0.0, 0.0, 0.0)
        solver = BlockSolver(self._plan, self._weights, {}, self._model.device, record)
        stored: dict[str, Tensor] = {}
        for decision in self._layers.get(None, []):
            with self._model.head() as head:
                seen: Hessian | Energy | None = None
                for number, batch in enumerate(batches):
                    states = [
                        head.normalize(store.read(depth, name, number).to(self._model.device))[batch.valid]
                        for name in self._streams
                    ]
                    seen = seen or self._statistic("lm_head", states[0].shape[-1])
                    seen.add(*states)
                method = self._plan.recipe.method
                stored |= solver.solve_alone(decision, Knowledge.of(seen, method.name, method.correction))
        record.close(solver.errors, time.monotonic() - started)
        self._finish("block-head.pt", stored, record)
        self.progress.finished = True
        self.progress.save(self._folder)
        if stored:
            self._listener(Said(_line("lm_head", record)))

    def _finish(self, name: str, stored: Mapping[str, Tensor], record: BlockRecord) -> None:
        """Make a block's tensors durable before the state says that it is done."""
        staged = self._folder / f"{name}.new"
        with staged.open("wb") as file:
            torch.save(dict(stored), file)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(self._folder / name)
        self.progress.records.append(record)

    def _statistic(self, name: str, columns: int) -> Hessian | Energy:
        """Zeros in memory, or in a mapped file of the work folder where memory is short."""
        method = self._plan.recipe.method.name
        if method != "gptq" or not self._spill:
            return statistic(method, columns, self._model.device)
        hessian = Hessian(columns, device="meta")
        hessian.lower = self._mapped(f"{name}-moment", columns)
        hessian.cross = self._mapped(f"{name}-cross", columns) if "full" in self._streams else None
        return hessian

    def _mapped(self, name: str, columns: int) -> Tensor:
        path = self._folder / f"statistics-{name}.bin"
        path.unlink(missing_ok=True)
        return torch.from_file(str(path), shared=True, size=columns * columns, dtype=torch.float32).view(
            columns, columns
        )

    def _broken(self, batch: Batch, states: Sequence[Tensor]) -> list[int]:
        """Rows with a value that is not finite behind this block."""
        fine = torch.stack([s.isfinite().all(-1) | ~batch.valid for s in states]).all(0).all(-1)
        return [row for row, ok in zip(batch.rows, fine.tolist(), strict=True) if not ok]

    def _exclude(self, batches: Sequence[Batch], rows: Sequence[int]) -> None:
        """Leave rows out of all further statistics; give up when too many are lost."""
        for batch in batches:
            for position, row in enumerate(batch.rows):
                if row in rows:
                    batch.valid[position] = False
        fresh = sorted(set(rows) - set(self.progress.excluded))
        self.progress.excluded = sorted({*self.progress.excluded, *rows})
        for row in fresh:
            self._listener(Said(f"calibration row {row} gives values that are not finite: it is left out from here on"))
        if len(self.progress.excluded) > MAX_EXCLUDED * len(self._rows):
            raise CalibrationError(
                f"{len(self.progress.excluded)} of {len(self._rows)} calibration rows give values that are not finite",
                hint="check the source with `sparkquant verify --deep`, and run with device cpu in float32",
            )


def _line(name: str, record: BlockRecord) -> str:
    gain = 1 - record.error / record.nearest_error if record.nearest_error else 0.0
    coverage = f", {len(record.fallbacks)} parts without enough tokens" if record.fallbacks else ""
    return (
        f"{name}: output error {record.error:.5f}, {gain:.0%} below round to nearest ({record.nearest_error:.5f}),"
        f" {record.seconds:.1f} s{coverage}"
    )


def finished_blocks(folder: Path) -> list[Path]:
    """The files of finished blocks."""
    return sorted(folder.glob("block-*.pt"))


def stored_tensors_of(path: Path) -> Mapping[str, Tensor]:
    """Stored tensors of a finished block, mapped."""
    tensors: dict[str, Tensor] = torch.load(path, weights_only=True, mmap=True)
    return tensors
