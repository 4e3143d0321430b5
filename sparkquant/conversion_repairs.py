"""What `convert` repairs, one function for each kind of damage; every one says what it did."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparkquant.checkpoint import Checkpoint, TensorHeader
from sparkquant.errors import CheckpointError, Problem
from sparkquant.formats.stored import StoredModule
from sparkquant.layers import PROTECTED, LayerClass, Layout
from sparkquant.provenance import kept_name
from sparkquant.reading import TORCH_DTYPES, ShardReader
from sparkquant.verification.identity import ALLOWED, REQUIRED

DRAFT_BITS = 8
"""A draft head below this is replaced by the source's: it changes no answer, only how often drafts are accepted."""

GRAFTABLE = frozenset(PROTECTED) | {LayerClass.LM_HEAD}


@dataclass
class Repairs:
    """One conversion: what comes in, and what was changed so far.

    changed   kept tensors that the producer itself changed: they stay
    """

    checkpoint: Checkpoint
    original: Checkpoint | None
    layout: Layout
    changes: list[str] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)

    def __enter__(self) -> Repairs:
        return self

    def __exit__(self, *_: object) -> None:
        if self.original is not None:
            self.source_reader.__exit__()

    def say(self, change: str) -> None:
        """Note one change, for the user and for the record."""
        self.changes.append(change)

    @cached_property
    def source_reader(self) -> ShardReader:
        """Open shards of the source."""
        assert self.original is not None
        return ShardReader(self.original)

    def config(self) -> dict[str, Any]:
        """config.json without any quantization: the source's where there is one."""
        base = dict((self.original or self.checkpoint).config)
        base.pop("quantization_config", None)
        text = base.get("text_config")
        if isinstance(text, Mapping):
            base["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
        return base


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def renamed_modules(repairs: Repairs, modules: Mapping[str, StoredModule]) -> dict[str, str]:
    """Every module's name in the result: the source's spelling where the producer saved a text-only class."""
    names = {name: name for name in modules}
    if repairs.original is None:
        return names
    ours = {name.removesuffix(".weight") for name in repairs.original.tensors}
    spelled: dict[str, str] = {}
    for name in ours:
        for pattern, to in repairs.layout.live_names:
            live = re.sub(pattern, to, name)
            if live != name and "[" not in to:
                spelled[live] = name
    prefixes = {live.rpartition(".layers.")[0]: name.rpartition(".layers.")[0] for live, name in spelled.items()}
    for name in modules:
        if name in ours:
            continue
        head, middle, tail = name.partition(".layers.")
        if name in spelled:
            names[name] = spelled[name]
        elif middle and prefixes.get(head, head) != head:  # one expert of a tensor that the source keeps fused
            names[name] = f"{prefixes[head]}{middle}{tail}"
    renamed = [f"{old} -> {new}" for old, new in names.items() if old != new]
    if renamed:
        repairs.say(f"{len(renamed)} modules renamed as the source has them: {_some(renamed)}")
    return names


def without_coarse_draft(repairs: Repairs, modules: Mapping[str, StoredModule]) -> dict[str, StoredModule]:
    """The modules without a draft head of fewer than 8 bits, where the source has a better one."""

    def is_coarse(name: str, module: StoredModule) -> bool:
        placement = repairs.layout.place(f"{name}.weight")
        draft = placement is not None and placement.layer_class is LayerClass.MTP
        return draft and module.scheme is not None and module.scheme.scheme.bits < DRAFT_BITS

    coarse = [name for name, module in modules.items() if is_coarse(name, module)]
    if not coarse or repairs.original is None:
        return dict(modules)
    repairs.say(f"draft head below {DRAFT_BITS} bits replaced by the source's: {_some(coarse)}")
    return {name: module for name, module in modules.items() if name not in coarse}


def refuse_protected(repairs: Repairs, modules: Mapping[str, StoredModule]) -> None:
    """Quantized gates, towers or routers: putting the source's weights back would change every answer."""
    problems = []
    for name, module in modules.items():
        placement = repairs.layout.place(f"{name}.weight")
        if placement is None or module.scheme is None or placement.layer_class not in PROTECTED:
            continue
        if placement.layer_class is not LayerClass.MTP or module.scheme.scheme.bits < DRAFT_BITS:
            what = f"is stored as {module.scheme.label}; {placement.layer_class}: {PROTECTED[placement.layer_class]}"
            problems.append(Problem(name, what))
    if problems:
        raise CheckpointError(
            f"{repairs.checkpoint.path} cannot be repaired without changing numbers",
            hint="quantize the 16-bit source again",
            problems=problems,
        )


def restored_dtypes(
    repairs: Repairs, modules: Mapping[str, StoredModule], names: Mapping[str, str], reader: ShardReader
) -> dict[str, TensorHeader]:
    """Kept tensors that are the source's but for a cast, by name; those that really differ are noted and stay."""
    if repairs.original is None:
        return {}
    restored: dict[str, TensorHeader] = {}
    for name, module in modules.items():
        if module.scheme is not None:
            continue
        for suffix, header in module.tensors.items():
            stored = f"{names[name]}.{suffix}" if suffix else names[name]
            wanted = repairs.original.tensors.get(stored)
            if wanted is None or wanted.shape != header.shape:
                continue
            mine, theirs = reader.read(header.name), repairs.source_reader.read(wanted.name)
            if torch.equal(theirs.to(TORCH_DTYPES[header.dtype]), mine):
                if header.dtype != wanted.dtype:
                    restored[stored] = wanted
            else:
                repairs.changed.add(stored)
    if restored:
        repairs.say(f"{len(restored)} tensors in the source's dtype again: {_some(sorted(restored))}")
    if repairs.changed:
        found = _some(sorted(repairs.changed))
        repairs.say(
            f"{len(repairs.changed)} kept tensors differ from the source and stay as the producer made them: {found}"
        )
    return restored


def graft(repairs: Repairs, present: set[str], quantized: set[str | None]) -> Iterator[TensorHeader]:
    """Tensors that the source has and the checkpoint lost; CheckpointError where a quantized weight is lost."""
    if repairs.original is None:
        return
    groups = {p.group for name in present if (p := repairs.layout.place(_weight(name))) is not None and p.group}
    lost: dict[str, list[TensorHeader]] = {}
    problems: list[Problem] = []
    for name, header in repairs.original.tensors.items():
        placement = repairs.layout.place(name)
        if name in present or name.removesuffix(".weight") in quantized or placement is None:
            continue
        if placement.rule.parts and placement.group in groups:
            continue  # stored expert by expert
        if placement.layer_class in GRAFTABLE:
            lost.setdefault(str(placement.layer_class), []).append(header)
        else:
            problems.append(Problem(name, "is in the source and not in the checkpoint"))
    if problems:
        raise CheckpointError("decoder weights are missing", hint="quantize the source again", problems=problems)
    for layer_class, headers in lost.items():
        repairs.say(
            f"{len(headers)} tensors of {layer_class} taken from the source: {_some([h.name for h in headers])}"
        )
        yield from headers


def _weight(name: str) -> str:
    """The 16-bit name of a stored tensor."""
    module, _, suffix = name.rpartition(".")
    return f"{module}.weight" if suffix.startswith("weight") else name


def restored_files(repairs: Repairs, old_configs: Sequence[str]) -> dict[str, Path]:
    """Side files of the result by name: the source's where it has them and engines read them."""
    mine = [n for n in repairs.checkpoint.side_files() if n.split("/")[0] not in ("sparkquant", *old_configs)]
    files = {kept_name(name): repairs.checkpoint.path / name for name in mine}
    if repairs.original is None:
        return files
    missing, unlike = [], []
    for name in repairs.original.side_files():
        base = name.rpartition("/")[2]
        if name.startswith("sparkquant/") or not any(fnmatchcase(base, pattern) for pattern in REQUIRED):
            continue
        theirs = repairs.original.path / name
        if name not in files:
            missing.append(name)
        elif files[name].read_bytes() != theirs.read_bytes():
            unlike.append(name)
        files[name] = theirs
    if missing:
        repairs.say(f"{len(missing)} side files taken from the source: {_some(missing)}")
    if unlike:
        repairs.say(f"{len(unlike)} side files are the source's again: {_some(unlike)}")
    before, after = dict(repairs.checkpoint.config), dict(repairs.original.config)
    keys = sorted(k for k in {*before, *after} - ALLOWED if before.get(k) != after.get(k))
    if keys:
        repairs.say(f"config.json is the source's again: {_some(keys)}")
    return files
