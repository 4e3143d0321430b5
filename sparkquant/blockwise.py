"""Calibrated quantization, block by block: rows in, stored tensors out, into a private work folder.

For every block: one pass of both streams through the source block fills the Hessians; every matrix is solved; the
quantized block advances its stream. Nothing larger than a block, its statistics and a batch of rows is in memory. Each
finished block is durable, so a killed run goes on behind it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparkquant.backends.matrices import decision_peaks, planned_scheme
from sparkquant.backends.solving import Knowledge, solve
from sparkquant.decisions import Decision, Plan
from sparkquant.errors import CalibrationError
from sparkquant.events import Advanced, Finished, Listener, Said, Started
from sparkquant.layers import LayerClass
from sparkquant.live import live_view
from sparkquant.numerics.hessian import Hessian
from sparkquant.numerics.nvfp4 import global_scale
from sparkquant.rowstore import RowStore
from sparkquant.statistics import Collector, ExpertInputs, Site, sites
from sparkquant.stream import Batch, StreamedModel
from sparkquant.weights import StoredWeights

BATCH_TOKENS = 4096
EXPERT_TOKENS = 32
"""An expert that saw fewer calibration tokens is quantized without them, and the report says so."""

MAX_EXCLUDED = 0.1
"""Share of rows that may turn non-finite before the run is given up."""

STATE = "state.json"


@dataclass
class BlockRecord:
    """What happened in one block (index None: lm_head): output errors as shares, and the experts' coverage."""

    index: int | None
    error: float
    nearest_error: float
    seconds: float
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)


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
        self._method, self._correction = plan.recipe.method.name, plan.recipe.method.correction
        self._listener, self._spill = listener, spill
        self._streams = ("quantized", "full") if self._correction > 0 and self._method == "gptq" else ("quantized",)
        self._layers: dict[int | None, list[Decision]] = {}
        for decision in plan.decisions.values():
            if decision.scheme is not None and decision.layer_class is not LayerClass.MTP:
                self._layers.setdefault(decision.layer, []).append(decision)
        self.progress = Progress.load(folder)

    def run(self) -> None:
        """Quantize every block that is not done, then lm_head."""
        batches = self._model.embed(self._rows, tokens=BATCH_TOKENS)
        shapes = [(b.hidden.shape[0], b.hidden.shape[1], b.hidden.shape[2]) for b in batches]
        store = RowStore(self._folder, shapes, self._model.dtype, self._streams)
        if self.progress.blocks == 0:
            store.start(batches)
        else:
            self._listener(Said(f"resuming: {self.progress.blocks} of {self._model.depth} blocks are done already"))
        self._exclude(batches, self.progress.excluded)
        total = sum(len(row) for row in self._rows) * self._model.depth
        self._listener(Started("calibrate", total))
        for index in range(self._model.depth):
            if index >= self.progress.blocks:
                self._block(index, batches, store)
            self._listener(Advanced("calibrate", total // self._model.depth, f"block {index}"))
        if not self.progress.finished:
            self._head(batches, store)
        self._listener(Finished("calibrate"))

    def _block(self, index: int, batches: Sequence[Batch], store: RowStore) -> None:
        started = time.monotonic()
        decisions = self._layers.get(index, [])
        record = BlockRecord(index, 0.0, 0.0, 0.0)
        with self._model.block(index) as block, torch.no_grad():
            where = sites(block, self._model.block_prefix(index), decisions, self._plan.layout)
            collector = Collector(where, self._hessian, len(self._streams))
            with collector.collecting():
                for number, batch in enumerate(batches):
                    collector.batch(batch.valid)
                    streams = [store.read(index, name, number) for name in self._streams]
                    behind = self._model.run(block, index, torch.cat(streams).to(self._model.device))
                    if "full" in self._streams:
                        store.write(index + 1, "full", number, behind[batch.ids.shape[0] :])
                    self._exclude(
                        batches, [r for r, bad in zip(batch.rows, collector.broken.tolist(), strict=True) if bad]
                    )
            stored = dict(self._solve_block(block, index, where, collector, record))
            for number, batch in enumerate(batches):
                states = store.read(index, "quantized", number).to(self._model.device)
                behind = self._model.run(block, index, states)
                store.write(index + 1, "quantized", number, behind)
                self._exclude(batches, self._broken(batch, [store.read(index + 1, s, number) for s in self._streams]))
        record.seconds = round(time.monotonic() - started, 2)
        self._finish(f"block-{index:05d}.pt", stored, record)
        self.progress.blocks = index + 1
        self.progress.save(self._folder)
        if stored:
            self._listener(Said(_line(f"block {index}", record)))

    def _solve_block(
        self, block: nn.Module, index: int, where: Sequence[Site], collector: Collector, record: BlockRecord
    ) -> Iterator[tuple[str, Tensor]]:
        parameters = {f"{self._model.block_prefix(index)}.{name}": p for name, p in block.named_parameters()}
        errors: list[tuple[float, float]] = []
        for site in where:
            if site.is_experts:
                yield from self._solve_experts(site, collector.experts.pop(site.group, ExpertInputs()), errors, record)
                continue
            knowledge = Knowledge.of(collector.hessians.pop(site.group, None), self._method, self._correction)
            if knowledge.used == "mse":
                record.fallbacks.append(site.group)
            yield from self._solve_group(site, parameters, knowledge, errors)
        record.error = sum(error for error, _ in errors) / max(1, len(errors))
        record.nearest_error = sum(nearest for _, nearest in errors) / max(1, len(errors))

    def _solve_group(
        self, site: Site, parameters: Mapping[str, Tensor], knowledge: Knowledge, errors: list[tuple[float, float]]
    ) -> Iterator[tuple[str, Tensor]]:
        matrices = {d.tensor: self._weights.read(d.tensor).to(self._model.device) for d in site.decisions}
        peak = max(decision_peaks(d, matrices[d.tensor])[0] for d in site.decisions)
        for decision in site.decisions:
            _, live = live_view(decision.tensor, parameters, self._plan.layout)
            yield from self._solve_one(
                decision, decision.module, matrices[decision.tensor], peak, live, knowledge, errors
            )

    def _solve_one(
        self,
        decision: Decision,
        module: str,
        matrix: Tensor,
        peak: float,
        live: Tensor | None,
        knowledge: Knowledge,
        errors: list[tuple[float, float]],
    ) -> Iterator[tuple[str, Tensor]]:
        """Solve one matrix, put what it stands for into the live block, and yield what is stored."""
        scheme = planned_scheme(decision)
        divisor = global_scale(peak) if scheme.name == "nvfp4a16" else None
        outcome = solve(scheme, matrix, divisor, knowledge)
        if live is not None:
            live.copy_(outcome.weight)
        if knowledge.used != "mse":
            errors.append((outcome.error, outcome.nearest_error))
        yield from ((f"{module}.{suffix}", tensor.cpu()) for suffix, tensor in outcome.stored)

    def _solve_experts(
        self, site: Site, inputs: ExpertInputs, errors: list[tuple[float, float]], record: BlockRecord
    ) -> Iterator[tuple[str, Tensor]]:
        """Every expert with the tokens routed to it; `down` sees what its own quantized gate and up make of them."""
        experts: Any = site.module
        counts: list[int] = []
        for expert, members in sorted(_by_expert(site.decisions).items()):
            streams = inputs.of(expert)
            counts.append(streams[0].shape[0] if streams else 0)
            enough = counts[-1] >= EXPERT_TOKENS
            if not enough:
                record.fallbacks.append(f"{site.group}.{expert}")
            gate_up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
            full_between = [_between(experts, states, gate_up) for states in streams[1:]] if enough else []
            for kind, weight in ((LayerClass.EXPERTS_GATE_UP, gate_up), (LayerClass.EXPERTS_DOWN, down)):
                if kind is LayerClass.EXPERTS_DOWN and enough:
                    streams = [_between(experts, streams[0], gate_up), *full_between]
                hessian = Hessian(weight.shape[1], device=self._model.device) if enough else None
                if hessian is not None:
                    hessian.add(*streams)
                knowledge = Knowledge.of(hessian, self._method, self._correction)
                chosen = [member for member in members if member[0].layer_class is kind]
                matrices = [self._expert_matrix(decision, part) for decision, _, part in chosen]
                peak = max(float(matrix.abs().max()) for matrix in matrices)
                start = 0
                for (decision, module, _), matrix in zip(chosen, matrices, strict=True):
                    live = weight[start : start + matrix.shape[0]]
                    start += matrix.shape[0]
                    yield from self._solve_one(decision, module, matrix, peak, live, knowledge, errors)
        record.expert_tokens[site.group] = counts

    def _expert_matrix(self, decision: Decision, part: tuple[int, int] | None) -> Tensor:
        weight = self._weights.read(decision.tensor)
        if part is not None:
            expert, position = part
            weight = weight[expert].chunk(len(decision.parts), dim=0)[position]
        decision_peaks(replace(decision, parts=()), weight)
        return weight.to(self._model.device)

    def _head(self, batches: Sequence[Batch], store: RowStore) -> None:
        """lm_head, whose inputs are the normalized states behind the last block."""
        started, depth = time.monotonic(), self._model.depth
        record = BlockRecord(None, 0.0, 0.0, 0.0)
        stored: dict[str, Tensor] = {}
        errors: list[tuple[float, float]] = []
        for decision in self._layers.get(None, []):
            with self._model.head() as head:
                hessian: Hessian | None = None
                for number, batch in enumerate(batches):
                    states = [
                        head.normalize(store.read(depth, name, number).to(self._model.device))[batch.valid]
                        for name in self._streams
                    ]
                    hessian = hessian or self._hessian("lm_head", states[0].shape[-1])
                    hessian.add(*states)
                knowledge = Knowledge.of(hessian, self._method, self._correction)
                matrix = self._weights.read(decision.tensor).to(self._model.device)
                peak = decision_peaks(decision, matrix)[0]
                stored |= self._solve_one(decision, decision.module, matrix, peak, None, knowledge, errors)
        record.error = sum(error for error, _ in errors) / max(1, len(errors))
        record.nearest_error = sum(nearest for _, nearest in errors) / max(1, len(errors))
        record.seconds = round(time.monotonic() - started, 2)
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

    def _hessian(self, name: str, columns: int) -> Hessian:
        """Zeros in memory, or in a mapped file of the work folder where memory is short."""
        hessian = Hessian(columns, device="meta" if self._spill else self._model.device)
        if self._spill:
            hessian.moment = self._mapped(f"{name}-moment", columns)
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
        fine = torch.stack([s.to(batch.valid.device).isfinite().all(-1) | ~batch.valid for s in states]).all(0).all(-1)
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


def _by_expert(decisions: Sequence[Decision]) -> dict[int, list[tuple[Decision, str, tuple[int, int] | None]]]:
    """(decision, module name, (expert, part) of a fused tensor) of every expert, gate before up before down."""
    found: dict[int, list[tuple[Decision, str, tuple[int, int] | None]]] = {}
    for decision in sorted(decisions, key=lambda d: (d.layer_class is LayerClass.EXPERTS_DOWN, d.tensor)):
        parent = decision.module.rpartition(".")[0]
        if not decision.parts:
            found.setdefault(int(parent.rpartition(".")[2]), []).append((decision, decision.module, None))
            continue
        for expert in range(decision.experts):
            for position, part in enumerate(decision.parts):
                module = f"{parent}.{expert}.{part}"
                found.setdefault(expert, []).append((decision, module, (expert, position)))
    return found


def _between(experts: Any, inputs: Tensor, gate_up: Tensor) -> Tensor:
    """What an expert's down projection reads."""
    gate, up = functional.linear(inputs, gate_up).chunk(2, dim=-1)
    between: Tensor = experts.act_fn(gate) * up
    return between


def finished_tensors(folder: Path) -> Iterator[Mapping[str, Tensor]]:
    """Stored tensors of every finished block, one block at a time."""
    for path in sorted(folder.glob("block-*.pt")):
        tensors: dict[str, Tensor] = torch.load(path, weights_only=True, mmap=True)
        yield tensors
