"""Passes through one block that compute its token mixer once: attention and recurrences cost most of a pass.

A block is solved stage by stage (`stages`), each with a pass over all rows. From the stage on whose mixer inputs are
final, what the mixer hands to its output projection is kept in a file, and later passes begin there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparkquant.layers import LayerClass
from sparkquant.rowstore import RowFile
from sparkquant.statistics import Enough, Site
from sparkquant.stream import StreamedModel

OUTPUTS = frozenset({LayerClass.ATTENTION_OUT, LayerClass.MLA_OUT, LayerClass.LINEAR_ATTENTION_OUT, LayerClass.SSM_OUT})
"""Classes of the Linear at the end of a token mixer."""

_RANKS = (
    {
        LayerClass.ATTENTION_QKV, LayerClass.MLA_Q, LayerClass.MLA_KV, LayerClass.LINEAR_ATTENTION_QKVZ,
        LayerClass.SSM_IN, LayerClass.SSM_DT, LayerClass.SHORT_CONV,
    },
    OUTPUTS,
    {
        LayerClass.MLP_GATE_UP, LayerClass.MLP_DOWN, LayerClass.EXPERTS_GATE_UP, LayerClass.EXPERTS_DOWN,
        LayerClass.SHARED_EXPERT_GATE_UP, LayerClass.SHARED_EXPERT_DOWN,
    },
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """Sites whose inputs do not depend on each other; `mixed` when the mixers' inputs are final in its pass."""

    sites: tuple[Site, ...]
    mixed: bool


def stage_of(layer_class: LayerClass) -> int:
    """The stage in which a class is solved: mixer inputs (and whatever is unknown), mixer outputs, what follows."""
    return next((number for number, members in enumerate(_RANKS) if layer_class in members), 0)


def stages(sites: Sequence[Site]) -> list[Stage]:
    """Sites in the order in which they are solved: what a stage reads comes from the quantized stages before it."""
    ranked: dict[int, list[Site]] = {}
    for site in sites:
        rank = min(stage_of(decision.layer_class) for decision in site.decisions)
        ranked.setdefault(rank, []).append(site)
    return [Stage(tuple(ranked[rank]), rank > 0) for rank in sorted(ranked)]


@dataclass(frozen=True)
class Mixer:
    """A module whose output is that of its last Linear: `out` reads [B, L, K]; a tuple's other elements are None."""

    module: nn.Module
    out: nn.Module
    others: int | None

    def result(self, inputs: Tensor) -> Any:
        """What the module returns when its last Linear reads these inputs."""
        projected = self.out(inputs)
        return projected if self.others is None else (projected, *[None] * self.others)


def find_mixer(
    model: StreamedModel, block: nn.Module, index: int, path: str, states: Tensor
) -> tuple[Mixer, int] | None:
    """The mixer around the Linear `path` and K, found by running `states`; None where it is not as `Mixer` says."""
    module, out = block.get_submodule(path.rpartition(".")[0]), block.get_submodule(path)
    seen: dict[str, Any] = {}
    hooks = [
        out.register_forward_hook(lambda _, args, output: seen.update(inputs=args[0], projected=output)),
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
    return Mixer(module, out, len(others) if isinstance(seen["returned"], tuple) else None), inputs.shape[-1]


class Passes:
    """Runs of one block over all batches, each stream by itself. `paths` name the Linears at the end of its mixers."""

    def __init__(
        self,
        model: StreamedModel,
        block: nn.Module,
        index: int,
        paths: Sequence[str],
        folder: Path,
        shapes: Sequence[tuple[int, int]],
        probe: Tensor,
    ) -> None:
        self._model, self._block, self._index = model, block, index
        found = [find_mixer(model, block, index, path, probe) for path in paths]
        self._mixers = [pair[0] for pair in found if pair is not None]
        self._widths = [pair[1] for pair in found if pair is not None]
        self._folder, self._shapes = folder, shapes
        self._files: dict[tuple[int, str], RowFile] = {}
        self._stored: dict[tuple[int, str], int] = {}

    def run(self, stream: str, batch: int, states: Tensor, *, mixed: bool) -> Tensor | None:
        """States behind the block, or None when a hook had `Enough`. With `mixed`, mixers' outcomes are kept."""
        with ExitStack() as stack:
            for number, mixer in enumerate(self._mixers):
                key = number, stream
                if self._stored.get(key, 0) == len(self._shapes):
                    kept = self._files[key].read(batch).to(states.device)
                    stack.enter_context(_replaced(mixer, kept))
                elif mixed:
                    stack.enter_context(self._storing(key, mixer, batch))
            try:
                return self._model.run(self._block, self._index, states)
            except Enough:
                return None

    @contextmanager
    def _storing(self, key: tuple[int, str], mixer: Mixer, batch: int) -> Iterator[None]:
        if key not in self._files:
            path = self._folder / f"mixed-{key[0]}-{key[1]}.bin"
            self._files[key] = RowFile(path, self._shapes, self._widths[key[0]], self._model.dtype)

        def store(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._files[key].write(batch, args[0])
            self._stored[key] = self._stored.get(key, 0) + 1

        hook = mixer.out.register_forward_pre_hook(store, prepend=True)
        try:
            yield
        finally:
            hook.remove()


@contextmanager
def _replaced(mixer: Mixer, inputs: Tensor) -> Iterator[None]:
    """The mixer begins at its last Linear, with these inputs."""
    module: Any = mixer.module
    module.forward = lambda *_args, **_keywords: mixer.result(inputs)
    try:
        yield
    finally:
        del module.forward
