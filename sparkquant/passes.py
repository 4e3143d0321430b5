"""Passes of calibration rows through one block, in which no module is computed twice with the same weights.

A block is solved stage by stage (`stages`), each with a pass over all rows. What is in front of a module's last Linear
is kept in a file once it is final, and what comes out of it once that Linear is solved: later passes begin there.
Token mixers cost most of a pass; an MLP is worth a file on a CPU alone, an accelerator computes faster than disks read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparkquant.layers import LayerClass
from sparkquant.rowstore import RowFile
from sparkquant.statistics import Enough, Site
from sparkquant.stream import StreamedModel

_RANKS = (
    {
        LayerClass.ATTENTION_QKV, LayerClass.MLA_Q, LayerClass.MLA_KV, LayerClass.LINEAR_ATTENTION_QKVZ,
        LayerClass.SSM_IN, LayerClass.SSM_DT, LayerClass.SHORT_CONV,
    },
    {LayerClass.ATTENTION_OUT, LayerClass.MLA_OUT, LayerClass.LINEAR_ATTENTION_OUT, LayerClass.SSM_OUT},
    {
        LayerClass.MLP_GATE_UP, LayerClass.EXPERTS_GATE_UP, LayerClass.EXPERTS_DOWN, LayerClass.SHARED_EXPERT_GATE_UP,
    },
    {LayerClass.MLP_DOWN, LayerClass.SHARED_EXPERT_DOWN},
)  # fmt: skip

LAST = len(_RANKS)
"""The rank of the pass in which everything is solved."""

PROBE = 64
"""Positions of the row with which modules are tried out."""


@dataclass(frozen=True)
class Stage:
    """Sites that are solved after one pass, and their rank."""

    sites: tuple[Site, ...]
    rank: int


def stage_of(layer_class: LayerClass) -> int:
    """The stage in which a class is solved: mixer inputs (and whatever is unknown), mixer outputs, MLP, its end."""
    return next((number for number, members in enumerate(_RANKS) if layer_class in members), 0)


def ends_a_module(layer_class: LayerClass, device: torch.device) -> bool:
    """Whether what is in front of this Linear is worth a file."""
    return stage_of(layer_class) == 1 or (stage_of(layer_class) == 3 and device.type == "cpu")


def stages(sites: Sequence[Site]) -> list[Stage]:
    """Sites in the order in which they are solved: what a stage reads comes from the quantized stages before it."""
    ranked: dict[int, list[Site]] = {}
    for site in sites:
        rank = min(stage_of(decision.layer_class) for decision in site.decisions)
        ranked.setdefault(rank, []).append(site)
    return [Stage(tuple(ranked[rank]), rank) for rank in sorted(ranked)]


@dataclass(frozen=True)
class Ended:
    """A module whose output is that of its last Linear: `last` reads [B, L, K]; a tuple's other elements are None."""

    module: nn.Module
    last: nn.Module
    rank: int
    widths: tuple[int, int]
    others: int | None

    def returned(self, output: Tensor) -> Any:
        """What the module returns when this comes out of its last Linear."""
        return output if self.others is None else (output, *[None] * self.others)


def find_ended(
    model: StreamedModel, block: nn.Module, index: int, path: str, rank: int, states: Tensor
) -> Ended | None:
    """The module around the Linear `path`, found by running `states`; None where it is not as `Ended` says."""
    module, last = block.get_submodule(path.rpartition(".")[0]), block.get_submodule(path)
    seen: dict[str, Any] = {}
    hooks = [
        last.register_forward_hook(lambda _, args, output: seen.update(inputs=args[0], projected=output)),
        module.register_forward_hook(lambda *args: seen.update(returned=args[-1])),
    ]
    try:
        model.run(block, index, states)
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) < 3 or module is block:
        return None
    first, *others = seen["returned"] if isinstance(seen["returned"], tuple) else (seen["returned"],)
    inputs = seen["inputs"]
    plain = inputs.ndim == 3 and inputs.shape[:2] == states.shape[:2] and inputs.dtype == states.dtype
    if not plain or any(other is not None for other in others) or not torch.equal(first, seen["projected"]):
        return None
    count = len(others) if isinstance(seen["returned"], tuple) else None
    return Ended(module, last, rank, (inputs.shape[-1], first.shape[-1]), count)


class Passes:
    """Runs of one block over all batches, each stream by itself. `ends` are Linears at the ends of modules, by rank."""

    def __init__(
        self,
        model: StreamedModel,
        block: nn.Module,
        index: int,
        ends: Mapping[str, int],
        folder: Path,
        shapes: Sequence[tuple[int, int]],
        probe: Tensor,
    ) -> None:
        self._model, self._block, self._index = model, block, index
        found = (find_ended(model, block, index, path, rank, probe) for path, rank in ends.items())
        self._ended = [ended for ended in found if ended is not None]
        self._folder, self._shapes = folder, shapes
        self._files: dict[str, RowFile] = {}
        self._stored: dict[str, set[int]] = {}

    def run(self, stream: str, batch: int, states: Tensor, *, rank: int) -> Tensor | None:
        """States behind the block, or None when a hook had `Enough`. `rank` is the lowest that is not solved."""
        with ExitStack() as stack:
            for number, ended in enumerate(self._ended):
                front, behind = f"{number}-{stream}-front", f"{number}-{stream}-behind"
                if self._complete(behind):
                    stack.enter_context(_replaced(ended, partial(self._read, behind, batch)))
                elif self._complete(front):
                    finish = self._finish(ended, front, behind if ended.rank < rank < LAST else "", batch)
                    stack.enter_context(_replaced(ended, finish))
                elif ended.rank <= rank < LAST:
                    stack.enter_context(self._keeping(ended, front, batch))
            try:
                return self._model.run(self._block, self._index, states)
            except Enough:
                return None

    def _complete(self, key: str) -> bool:
        return len(self._stored.get(key, ())) == len(self._shapes)

    def _read(self, key: str, batch: int) -> Tensor:
        return self._files[key].read(batch).to(self._model.device)

    def _write(self, key: str, batch: int, states: Tensor) -> None:
        if key not in self._files:
            self._files[key] = RowFile(self._folder / f"{key}.bin", self._shapes, states.shape[-1], self._model.dtype)
        self._files[key].write(batch, states)
        self._stored.setdefault(key, set()).add(batch)

    def _finish(self, ended: Ended, front: str, behind: str, batch: int) -> Callable[[], Tensor]:
        """The module's last Linear alone; its output is kept as `behind` when it has a name."""

        def finish() -> Tensor:
            output: Tensor = ended.last(self._read(front, batch))
            if behind:
                self._write(behind, batch, output)
            return output

        return finish

    @contextmanager
    def _keeping(self, ended: Ended, front: str, batch: int) -> Iterator[None]:
        def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._write(front, batch, args[0])

        hook = ended.last.register_forward_pre_hook(keep, prepend=True)
        try:
            yield
        finally:
            hook.remove()


@contextmanager
def _replaced(ended: Ended, output: Callable[[], Tensor]) -> Iterator[None]:
    """The module gives this instead of computing."""
    module: Any = ended.module
    module.forward = lambda *_args, **_keywords: ended.returned(output())
    try:
        yield
    finally:
        del module.forward
