"""What the inputs of a block's Linears look like: hooks that fill one Hessian per fusion group while rows run through.

The streams run one after the other: quantized-so-far rows first, full-precision rows (if any) behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparkquant.decisions import Decision
from sparkquant.errors import CheckpointError
from sparkquant.layers import Layout
from sparkquant.live import live_view
from sparkquant.numerics.hessian import Energy, Hessian


class Enough(Exception):
    """Everything that this pass is for was seen."""


MakeStatistic = Callable[[str, int], Hessian | Energy]
"""From the name of a group and its number of inputs."""


def statistic(method: str, columns: int, device: torch.device) -> Hessian | Energy:
    """What a calibrated method needs to know of K inputs, empty."""
    return Hessian(columns, device=device) if method == "gptq" else Energy(columns, device=device)


@dataclass
class ExpertInputs:
    """Inputs of a layer's routed experts, [tokens, K] of every stream, and the experts that each token goes to."""

    streams: list[list[Tensor]] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)

    def of(self, expert: int) -> list[Tensor]:
        """Tokens routed to one expert, in every stream (routing is that of the quantized stream)."""
        picks = [(chosen == expert).any(-1) for chosen in self.chosen]
        return [torch.cat([p[pick] for p, pick in zip(parts, picks, strict=True)]) for parts in self.streams]


@dataclass
class Site:
    """Where one fusion group lives in the block: the module whose input it reads, and its decisions."""

    group: str
    module: nn.Module
    decisions: list[Decision]
    is_experts: bool


def sites(block: nn.Module, prefix: str, decisions: Sequence[Decision], layout: Layout) -> list[Site]:
    """The fusion groups of a block that take a scheme. `decisions` are those of its layer."""
    parameters = {f"{prefix}.{name}": parameter for name, parameter in block.named_parameters()}
    found: dict[str, Site] = {}
    for decision in decisions:
        if decision.scheme is None:
            continue
        key, _ = live_view(decision.tensor, parameters, layout)
        if key is None:
            raise CheckpointError(
                f"{decision.tensor} has no place in {type(block).__name__}",
                hint="use a data-free method (--method mse)",
            )
        path = key.removeprefix(f"{prefix}.")
        # A stacked expert parameter is no module of its own: its owner gets the routed inputs.
        stacked = not key.endswith(".weight")
        module = block.get_submodule(path.rpartition(".")[0])
        site = found.setdefault(decision.group, Site(decision.group, module, [], stacked))
        site.decisions.append(decision)
    return list(found.values())


class Collector:
    """Hessians (or energies) of the sites of one stage, filled by hooks while `collecting` is open.

    For every batch: `batch(valid)`, one run per stream, then `add`. A run stops with `Enough` at the last site.
    `broken` [B] tells which rows of the batch gave values that are not finite.
    """

    def __init__(self, sites: Sequence[Site], make: MakeStatistic) -> None:
        self.seen: dict[str, Hessian | Energy] = {}
        self.experts: dict[str, ExpertInputs] = {}
        self.valid = self.broken = torch.zeros(0, dtype=torch.bool)
        self._sites = sites
        self._make = make
        self._seen: dict[str, list[tuple[Tensor, ...]]] = {}

    def batch(self, valid: Tensor) -> None:
        """The next runs are about these positions [B, L]: True is no padding."""
        self.valid, self.broken = valid, torch.zeros(valid.shape[0], dtype=torch.bool, device=valid.device)
        self._seen = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Hooks are in place inside."""
        handles = [site.module.register_forward_pre_hook(self._hook(site)) for site in self._sites]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, site: Site) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001
            runs = self._seen.setdefault(site.group, [])
            runs.append(args[:2] if site.is_experts else args[:1])
            if all(len(self._seen.get(other.group, ())) >= len(runs) for other in self._sites):
                raise Enough

        return keep

    def add(self) -> None:
        """Take what the runs of this batch saw into the statistics, stream by stream of the same tokens."""
        for site in self._sites:
            runs = self._seen.get(site.group, [])
            if not runs:
                continue
            streams = [run[0].reshape(-1, run[0].shape[-1]) for run in runs]
            tokens = self._tokens(streams)
            parts = streams if tokens is None else [stream[tokens] for stream in streams]
            if not site.is_experts:
                if site.group not in self.seen:
                    self.seen[site.group] = self._make(site.group, parts[0].shape[-1])
                self.seen[site.group].add(*parts)
                continue
            inputs = self.experts.setdefault(site.group, ExpertInputs([[] for _ in parts]))
            for kept, part in zip(inputs.streams, parts, strict=True):
                kept.append(part)
            chosen = runs[0][1].reshape(-1, runs[0][1].shape[-1])
            inputs.chosen.append(chosen if tokens is None else chosen[tokens])
        self._seen = {}

    def _tokens(self, streams: Sequence[Tensor]) -> Tensor | None:
        """Which positions count: no padding, and finite in every stream. None: all of them."""
        wanted = self.valid.reshape(-1)
        # One number that is not finite makes the sum not finite; looking at each is several times slower.
        if all(bool(stream.sum(dtype=torch.float32).isfinite()) for stream in streams):
            return None if bool(wanted.all()) else wanted
        fine = torch.stack([stream.isfinite().all(-1) for stream in streams]).all(0)
        self.broken |= (wanted & ~fine).view(self.valid.shape).any(-1)
        return wanted & fine
