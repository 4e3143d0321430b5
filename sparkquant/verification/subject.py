"""What is under check: the folder, its modules, what its config and plan declare, and the engine's view of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparkquant import formats
from sparkquant.checkpoint import INDEX, Checkpoint
from sparkquant.engine.patterns import Budget, Entries, Pattern
from sparkquant.engine.rules import GENERIC, MODELS, VERSIONS, EngineModel, EngineModule, engine_modules
from sparkquant.engine.versions import Engine
from sparkquant.errors import CheckpointError, UnknownFamily
from sparkquant.formats.compressed_tensors import declaration
from sparkquant.formats.declaration import Declaration, Group
from sparkquant.formats.modelopt import SIDE_FILE
from sparkquant.formats.stored import StoredModule, StoredScheme, modules_of
from sparkquant.layers import LayerClass, Layout, Placement
from sparkquant.layouts import layout_for
from sparkquant.verification.planned import PlannedTensor, overlaid_names, planned_tensors

PLAN = "sparkquant/plan.json"


BASE = "0.25"
"""The version whose rules decide where none is named; rules.order compares the others with it."""


@dataclass(frozen=True)
class Serving:
    """What shall serve the result: an engine version, tensor-parallel sizes, a compute capability; None: any."""

    engine: Engine | None = None
    tp: tuple[int, ...] = (1,)
    capability: str | None = None


@dataclass(frozen=True)
class Subject:
    """One folder with everything that several checks ask of it, worked out once."""

    checkpoint: Checkpoint
    source: Checkpoint | None
    serving: Serving = Serving()

    @property
    def version(self) -> str:
        """The engine version by whose rules names are resolved."""
        return BASE if self.serving.engine is None else self.serving.engine.rules

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions that must agree: all that are known, or the one that was named."""
        return tuple(VERSIONS) if self.serving.engine is None else (self.version,)

    @property
    def path(self) -> Path:
        """The folder."""
        return self.checkpoint.path

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return self.checkpoint.config

    @cached_property
    def layout(self) -> Layout | None:
        """The family's layout; None for a family that is not known here."""
        try:
            return layout_for(self.config)
        except UnknownFamily:
            return None

    @cached_property
    def modules(self) -> dict[str, StoredModule]:
        """Stored modules without a judgement about their scheme."""
        return {name: StoredModule(name, found) for name, found in modules_of(self.checkpoint.tensors).items()}

    @cached_property
    def declared(self) -> Declaration | None:
        """What quantization_config says; None when there is none."""
        block = self.quantization
        if block is None:
            return None
        if not isinstance(block, Mapping) or "quant_method" not in block:
            return declaration(block)  # the faults of the commonest format
        return formats.declared(self.checkpoint)

    @cached_property
    def quantization(self) -> Any:
        """The quantization config as it is stored; None when there is none."""
        return formats.quantization_of(self.checkpoint)

    @cached_property
    def engine(self) -> EngineModel:
        """The engine's naming of this model."""
        model_type = self.config.get("model_type")
        return MODELS.get(model_type, GENERIC) if isinstance(model_type, str) else GENERIC

    @cached_property
    def linears(self) -> list[str]:
        """Modules with a weight of two or more dimensions that the engine may ask its config about."""
        return [
            name
            for name, module in self.modules.items()
            if (module.is_quantized or is_matrix(module)) and self.engine.takes_scheme(name)
        ]

    @cached_property
    def engine_modules(self) -> list[EngineModule]:
        """The engine's modules, fused as it fuses them."""
        return engine_modules(self.engine, self.linears)

    @cached_property
    def target_groups(self) -> list[Group]:
        """The group of every target, in config order."""
        return [group for group in (self.declared.groups if self.declared else ()) for _ in group.targets]

    @cached_property
    def targets(self) -> Entries:
        """All targets in config order, as the engine compares them."""
        groups = self.declared.groups if self.declared else ()
        return Entries((self.pattern(text) for group in groups for text in group.targets), self._budget)

    @cached_property
    def ignore(self) -> Entries:
        """The ignore list as the engine compares it."""
        return Entries(map(self.pattern, self.declared.ignore if self.declared else ()), self._budget)

    @cached_property
    def schemes(self) -> dict[str, StoredScheme]:
        """The scheme that the config declares for each module, in the engine's reading."""
        from sparkquant.verification.schemes_stored import declared_schemes

        return declared_schemes(self)

    @cached_property
    def _budget(self) -> Budget:
        return Budget()

    def pattern(self, text: str) -> Pattern:
        """An entry as the engine compares it; all share one budget of time."""
        return Pattern(self.engine.engine_entry(text), self._budget)

    def place(self, module: str) -> Placement | None:
        """Where the layout puts a stored module."""
        if self.layout is None:
            return None
        return self.layout.place(f"{module}.weight") or self.layout.place(module)

    @cached_property
    def source_modules(self) -> frozenset[str]:
        """Module names of the source; empty without one."""
        return frozenset(modules_of(self.source.tensors)) if self.source is not None else frozenset()

    def of_class(self, *classes: LayerClass) -> list[str]:
        """Stored modules of these classes."""
        return [name for name in self.modules if self.class_of(name) in classes]

    def class_of(self, module: str) -> LayerClass | None:
        """The layer class of a stored module."""
        placement = self.place(module)
        return None if placement is None else placement.layer_class

    @cached_property
    def plan(self) -> dict[str, PlannedTensor] | CheckpointError | None:
        """Every tensor that our own plan stores; an error when plan.json cannot be read, None when there is none."""
        path = self.path / PLAN
        if not readable(path, self.path):
            return CheckpointError(f"{PLAN} is no regular file", hint="") if path.is_symlink() else None
        try:
            return planned_tensors(path)
        except CheckpointError as error:
            return error

    @cached_property
    def overlaid(self) -> frozenset[str]:
        """Source tensors that a live model gave other weights: the files of the source do not hold those."""
        return overlaid_names(self.path / PLAN) if isinstance(self.plan, dict) else frozenset()


def is_matrix(module: StoredModule) -> bool:
    """Whether a module holds a plain weight of two or more dimensions."""
    plain = module.tensors.get("weight", module.tensors.get(""))
    return plain is not None and len(plain.shape) > 1


def readable(path: Path, folder: Path) -> bool:
    """A regular file inside the folder, or a link of the hub cache to its own blobs: nothing else is opened."""
    try:
        real = path.resolve()
        if not stat.S_ISREG(real.stat().st_mode):
            return False
    except (OSError, RuntimeError):
        return False
    root = folder.resolve()
    if root in real.parents:
        return True
    return root.parent.name == "snapshots" and (root.parent.parent / "blobs") in real.parents


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a folder of a stranger: nothing but regular files below it is ever opened."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder", hint="pass a folder with config.json and *.safetensors")
    for name in _weight_files(folder):
        path = folder / name
        if path.is_symlink() or path.exists():
            _require_readable(path, folder)
    return Checkpoint.open(folder, strict=False)


def _require_readable(path: Path, folder: Path) -> None:
    if not readable(path, folder):
        raise CheckpointError(
            f"{path} is no regular file of this folder", hint="replace the link or device by a copy of the real file"
        )


def _weight_files(folder: Path) -> Iterator[str]:
    yield from ("config.json", SIDE_FILE, INDEX)
    with os.scandir(folder) as entries:
        yield from sorted(entry.name for entry in entries if entry.name.endswith(".safetensors"))
