"""The matrices of one block, solved with what the calibration rows said about their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparkquant.backends.matrices import decision_peaks, planned_scheme
from sparkquant.backends.solving import Knowledge, solve
from sparkquant.decisions import Decision, Plan
from sparkquant.layers import LayerClass
from sparkquant.live import live_view
from sparkquant.numerics.nvfp4 import global_scale
from sparkquant.statistics import Collector, ExpertInputs, Site, statistic
from sparkquant.weights import StoredWeights

EXPERT_TOKENS = 32
"""An expert that saw fewer calibration tokens is quantized without them, and the report says so."""


@dataclass
class BlockRecord:
    """What happened in one block (index None: lm_head): output errors as shares, and the experts' coverage."""

    index: int | None
    error: float
    nearest_error: float
    seconds: float
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)

    def close(self, errors: Sequence[tuple[float, float]], seconds: float) -> None:
        """Fill in the means over all matrices, (error, error of round to nearest) each."""
        self.error = sum(error for error, _ in errors) / max(1, len(errors))
        self.nearest_error = sum(nearest for _, nearest in errors) / max(1, len(errors))
        self.seconds = round(seconds, 2)


class BlockSolver:
    """Solves sites of one loaded block; what was solved takes the source's place in the block's live parameters."""

    def __init__(
        self, plan: Plan, weights: StoredWeights, live: Mapping[str, Tensor], device: torch.device, record: BlockRecord
    ) -> None:
        self._plan, self._weights, self._live, self._device = plan, weights, live, device
        self._method, self._correction = plan.recipe.method.name, plan.recipe.method.correction
        self._originals: dict[str, Tensor] = {}
        self.errors: list[tuple[float, float]] = []
        self.record = record

    def solve(self, sites: Sequence[Site], collector: Collector, *, keep_source: bool) -> Iterator[tuple[str, Tensor]]:
        """Stored tensors of these sites; `keep_source` lets `source_weights` bring the block's own weights back."""
        for site in sites:
            if keep_source:
                self._remember(site)
            if site.is_experts:
                yield from self._solve_experts(site, collector.experts.pop(site.group, ExpertInputs()))
                continue
            knowledge = Knowledge.of(collector.seen.pop(site.group, None), self._method, self._correction)
            if knowledge.used == "mse":
                self.record.fallbacks.append(site.group)
            yield from self._solve_group(site, knowledge)

    def solve_alone(self, decision: Decision, knowledge: Knowledge) -> Iterator[tuple[str, Tensor]]:
        """Stored tensors of a matrix outside of all blocks (lm_head)."""
        matrix = self._weights.read(decision.tensor).to(self._device)
        peak = decision_peaks(decision, matrix)[0]
        yield from self._solve_one(decision, decision.module, matrix, peak, None, knowledge)

    @contextmanager
    def source_weights(self) -> Iterator[None]:
        """The block computes with the source's weights inside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for key, other in self._originals.items():
            live = self._live[key]
            self._originals[key], live.data = live.data, other

    def _remember(self, site: Site) -> None:
        for decision in site.decisions:
            key, _ = live_view(decision.tensor, self._live, self._plan.layout)
            if key is not None and key not in self._originals:
                self._originals[key] = self._live[key].detach().clone()

    def _solve_group(self, site: Site, knowledge: Knowledge) -> Iterator[tuple[str, Tensor]]:
        matrices = {d.tensor: self._weights.read(d.tensor).to(self._device) for d in site.decisions}
        peak = max(decision_peaks(d, matrices[d.tensor])[0] for d in site.decisions)
        for decision in site.decisions:
            _, live = live_view(decision.tensor, self._live, self._plan.layout)
            yield from self._solve_one(decision, decision.module, matrices[decision.tensor], peak, live, knowledge)

    def _solve_one(
        self,
        decision: Decision,
        module: str,
        matrix: Tensor,
        peak: float,
        live: Tensor | None,
        knowledge: Knowledge,
    ) -> Iterator[tuple[str, Tensor]]:
        """Solve one matrix, put what it stands for into the live block, and yield what is stored."""
        scheme = planned_scheme(decision)
        divisor = global_scale(peak) if scheme.name == "nvfp4a16" else None
        outcome = solve(scheme, matrix, divisor, knowledge)
        if live is not None:
            live.copy_(outcome.weight)
        if knowledge.used != "mse":
            self.errors.append((outcome.error, outcome.nearest_error))
        yield from ((f"{module}.{suffix}", tensor.cpu()) for suffix, tensor in outcome.stored)

    def _solve_experts(self, site: Site, inputs: ExpertInputs) -> Iterator[tuple[str, Tensor]]:
        """Every expert with the tokens routed to it; `down` sees what its own quantized gate and up make of them."""
        experts: Any = site.module
        counts: list[int] = []
        for expert, members in sorted(_by_expert(site.decisions).items()):
            streams = inputs.of(expert)
            counts.append(streams[0].shape[0] if streams else 0)
            enough = counts[-1] >= EXPERT_TOKENS
            if not enough:
                self.record.fallbacks.append(f"{site.group}.{expert}")
            gate_up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
            full_between = [_between(experts, states, gate_up) for states in streams[1:]] if enough else []
            for kind, weight in ((LayerClass.EXPERTS_GATE_UP, gate_up), (LayerClass.EXPERTS_DOWN, down)):
                if kind is LayerClass.EXPERTS_DOWN and enough:
                    streams = [_between(experts, streams[0], gate_up), *full_between]
                seen = statistic(self._method, weight.shape[1], self._device) if enough else None
                if seen is not None:
                    seen.add(*streams)
                knowledge = Knowledge.of(seen, self._method, self._correction)
                chosen = [member for member in members if member[0].layer_class is kind]
                matrices = [self._expert_matrix(decision, part) for decision, _, part in chosen]
                peak = max(float(matrix.abs().max()) for matrix in matrices)
                start = 0
                for (decision, module, _), matrix in zip(chosen, matrices, strict=True):
                    live = weight[start : start + matrix.shape[0]]
                    start += matrix.shape[0]
                    yield from self._solve_one(decision, module, matrix, peak, live, knowledge)
        self.record.expert_tokens[site.group] = counts

    def _expert_matrix(self, decision: Decision, part: tuple[int, int] | None) -> Tensor:
        weight = self._weights.read(decision.tensor)
        if part is not None:
            expert, position = part
            weight = weight[expert].chunk(len(decision.parts), dim=0)[position]
        decision_peaks(replace(decision, parts=()), weight)
        return weight.to(self._device)


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
