"""What is under check: the folder, its modules, what its config and plan declare, and the engine's view of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparkquant import formats
from sparkquant.checkpoint import INDEX, Checkpoint
from sparkquant.engine.models import model_of
from sparkquant.engine.patterns import Budget, Entries, Pattern
from sparkquant.engine.rules import VERSIONS, EngineModel, EngineModule, engine_modules
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


@dataclass(frozen=True)
class Serving:
    """What shall serve the result: an engine version, tensor-parallel sizes, a compute capability; None: any."""

    engine: Engine | None = None
    tp: tuple[int, ...] = (1,)
    capability: str | None = None


@dataclass(frozen=True)
class EngineView:
    """What one engine version makes of the names: its modules, and a config's entries in its spelling.

    linears  checkpoint modules with a matrix that the engine may ask its config about
    """

    model: EngineModel
    linears: Sequence[str]
    targets: Entries
    ignore: Entries

    @cached_property
    def modules(self) -> list[EngineModule]:
        """The engine's modules, fused as it fuses them."""
        return engine_modules(self.model, self.linears)

    @cached_property
    def module_of(self) -> dict[str, EngineModule]:
        """By checkpoint module: the engine's module that it is loaded into."""
        return {member: module for module in self.modules for member in module.members}


@dataclass(frozen=True)
class Subject:
    """One folder with everything that several checks ask of it, worked out once."""

    checkpoint: Checkpoint
    source: Checkpoint | None
    serving: Serving = Serving()

    @cached_property
    def version(self) -> str:
        """The engine version by whose rules names are resolved: the one that was named, or the oldest that loads it."""
        return self.versions[0] if self.serving.engine is None else self.serving.engine.rules

    @cached_property
    def versions(self) -> tuple[str, ...]:
        """Versions that must agree: all that load the checkpoint, or the one that was named."""
        if self.serving.engine is not None:
            return (self.serving.engine.rules,)
        return tuple(version for version in VERSIONS if not self.unloadable(version)) or tuple(VERSIONS)

    def unloadable(self, version: str) -> str:
        """Why a version cannot load this checkpoint, by the family's limits; "" when nothing is known against it."""
        if self.layout is None:
            return ""
        if absence := self.layout.absent_in(version):
            return absence
        quantized = (self.placements[n] for n, m in self.modules.items() if m.is_quantized and n in self.placements)
        return next((reason for placement in quantized if (reason := placement.rule.plain_in(version))), "")

    @property
    def reads_orders(self) -> bool:
        """Whether the engine version that was named reads activation orders; 0.33 refuses them."""
        return self.serving.engine is not None and self.version in ("0.25", "0.26")

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
    def view(self) -> EngineView:
        """The checkpoint as the engine version sees it by whose rules names are resolved."""
        return self.view_in(self.version)

    def view_in(self, version: str) -> EngineView:
        """The checkpoint as one engine version sees it."""
        model = model_of(self.config, version)
        return next((view for view in self._views if view.model == model), None) or self._new_view(model)

    def _new_view(self, model: EngineModel) -> EngineView:
        linears = [
            name
            for name, module in self.modules.items()
            if (module.is_quantized or is_matrix(module)) and model.takes_scheme(name)
        ]
        groups = self.declared.groups if self.declared else ()
        targets = [text for group in groups for text in group.targets]
        ignore = self.declared.ignore if self.declared else ()
        view = EngineView(model, linears, *(self._entries(model, texts) for texts in (targets, ignore)))
        self._views.append(view)
        return view

    def _entries(self, model: EngineModel, texts: Iterable[str]) -> Entries:
        """Entries as the engine compares them; all share one budget of time."""
        return Entries((Pattern(model.engine_entry(text), self._budget) for text in texts), self._budget)

    @cached_property
    def _views(self) -> list[EngineView]:
        return []

    @cached_property
    def engine(self) -> EngineModel:
        """The engine's naming of this model."""
        return self.view.model

    @cached_property
    def engine_modules(self) -> list[EngineModule]:
        """The engine's modules, fused as it fuses them."""
        return self.view.modules

    @cached_property
    def target_groups(self) -> list[Group]:
        """The group of every target, in config order."""
        return [group for group in (self.declared.groups if self.declared else ()) for _ in group.targets]

    @cached_property
    def targets(self) -> Entries:
        """All targets in config order, as the engine compares them."""
        return self.view.targets

    @cached_property
    def ignore(self) -> Entries:
        """The ignore list as the engine compares it."""
        return self.view.ignore

    @cached_property
    def schemes(self) -> dict[str, StoredScheme]:
        """The scheme that the config declares for each module, in the engine's reading."""
        from sparkquant.verification.schemes_stored import declared_schemes

        return declared_schemes(self)

    @cached_property
    def _budget(self) -> Budget:
        return Budget()

    def pattern(self, text: str) -> Pattern:
        """An entry as the engine compares it."""
        return Pattern(self.engine.engine_entry(text), self._budget)

    def place(self, module: str) -> Placement | None:
        """Where the layout puts a stored module."""
        if self.layout is None:
            return None
        return self.layout.place(f"{module}.weight") or self.layout.place(module)

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """Where the layout puts each stored module that it knows."""
        return {name: placement for name in self.modules if (placement := self.place(name)) is not None}

    @cached_property
    def source_modules(self) -> frozenset[str]:
        """Module names of the source; empty without one."""
        return frozenset(modules_of(self.source.tensors)) if self.source is not None else frozenset()

    def of_class(self, *classes: LayerClass) -> list[str]:
        """Stored modules of these classes."""
        return [name for name in self.modules if self.class_of(name) in classes]

    def class_of(self, module: str) -> LayerClass | None:
        """The layer class of a stored module."""
        placement = self.placements.get(module) or self.place(module)
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
