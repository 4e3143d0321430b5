"""What another quantizer is given, and what it gives back. Adapters see a live model and names, never files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sparkquant.schemes import Scheme


@dataclass(frozen=True, slots=True)
class Target:
    """One Linear to quantize.

    module, live   its name in the checkpoint and in the live model
    scale_group    modules that must share one NVFP4 global scale
    """

    module: str
    live: str
    scheme: Scheme
    scale_group: str


@dataclass(frozen=True)
class Work:
    """One run of a quantizer in a process of its own, whose global state it may change.

    rows     token ids, one conversation each; empty for methods that use the weights alone
    folder   private scratch space, with a config.json of the live model
    say      tells the user something
    """

    model: nn.Module
    targets: Sequence[Target]
    rows: Sequence[Sequence[int]]
    options: Mapping[str, Any]
    device: str
    folder: str
    say: Callable[[str], None]

    def by_scheme(self) -> dict[str, list[Target]]:
        """Targets by the label of their scheme."""
        found: dict[str, list[Target]] = {}
        for target in self.targets:
            found.setdefault(target.scheme.label, []).append(target)
        return found

    def by_scale_group(self) -> dict[str, list[Target]]:
        """Targets by the group that shares a global scale."""
        found: dict[str, list[Target]] = {}
        for target in self.targets:
            found.setdefault(target.scale_group, []).append(target)
        return found


@dataclass(frozen=True)
class Result:
    """What a quantizer did.

    quantized   live names of all modules that it quantized, asked for or not
    stored      (module, suffix, tensor) of everything to store, in the scheme's dtypes and shapes; taken once
    notes       what the record should say: rows left out, modules that fell back to rounding
    """

    quantized: frozenset[str]
    stored: Iterator[tuple[str, str, Tensor]]
    notes: Mapping[str, Any] = field(default_factory=dict)
