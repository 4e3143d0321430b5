"""What the inputs of a block's Linears look like: hooks that fill one Hessian per fusion group while rows run through.

The streams go through the source block in one batch, quantized-so-far rows first, full-precision rows (if any) behind
them: every hook sees the same token of either stream at once.
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
from sparkquant.numerics.hessian import Hessian

MakeHessian = Callable[[str, int], Hessian]


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
    """Hessians of all groups of a block, filled by hooks while `collecting` is open.

    `batch` sets which positions [B, L] of the running batch are no padding; `broken` [B] then tells which of its rows
    gave values that are not finite.
    """

    def __init__(self, sites: Sequence[Site], make: MakeHessian, streams: int) -> None:
        self.hessians: dict[str, Hessian] = {}
        self.experts: dict[str, ExpertInputs] = {}
        self.valid = self.broken = torch.zeros(0, dtype=torch.bool)
        self._sites = sites
        self._make = make
        self._streams = streams

    def batch(self, valid: Tensor) -> None:
        """The next run is about these positions."""
        self.valid, self.broken = valid, torch.zeros(valid.shape[0], dtype=torch.bool, device=valid.device)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Hooks are in place inside."""
        handles = [
            site.module.register_forward_pre_hook(self._expert_hook(site) if site.is_experts else self._hook(site))
            for site in self._sites
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _tokens(self, inputs: Tensor) -> Tensor:
        """Which positions of a stream count: no padding, and finite in every stream."""
        parts = inputs.reshape(-1, inputs.shape[-1]).chunk(self._streams)
        fine = torch.stack([part.isfinite().all(-1) for part in parts]).all(0)
        wanted = self.valid.reshape(-1)
        self.broken |= (wanted & ~fine).view(self.valid.shape).any(-1)
        return wanted & fine

    def _parts(self, inputs: Tensor, tokens: Tensor) -> list[Tensor]:
        """[tokens, K] of every stream."""
        return [part[tokens] for part in inputs.reshape(-1, inputs.shape[-1]).chunk(self._streams)]

    def _hook(self, site: Site) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001
            parts = self._parts(args[0], self._tokens(args[0]))
            if site.group not in self.hessians:
                self.hessians[site.group] = self._make(site.group, parts[0].shape[-1])
            self.hessians[site.group].add(*parts)

        return add

    def _expert_hook(self, site: Site) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001
            inputs = self.experts.setdefault(site.group, ExpertInputs([[] for _ in range(self._streams)]))
            tokens = self._tokens(args[0])
            for kept, part in zip(inputs.streams, self._parts(args[0], tokens), strict=True):
                kept.append(part)
            inputs.chosen.append(self._parts(args[1], tokens)[0])

        return keep
