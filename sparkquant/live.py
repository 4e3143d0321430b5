"""A live transformers model as a source: its changed weights, under the names of the checkpoint it was loaded from.

transformers never instantiates the draft head, and a text-only class drops the vision tower: a live model is a set of
changes to its source folder, never a checkpoint of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import Problem, UsageError
from sparkquant.layers import LayerClass, Layout
from sparkquant.layouts import layout_for
from sparkquant.reading import TORCH_DTYPES, ShardReader, raw_bytes

_MAY_BE_ABSENT = frozenset({LayerClass.MTP, LayerClass.VISION, LayerClass.AUDIO})
"""What a transformers class may leave out: these come from the files."""

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def source_folder(model: nn.Module, source: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """The folder or hub id that a live model came from."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a model is a folder, a hub id or a torch module, not {type(model).__name__}",
            hint="pass the path of a checkpoint folder",
        )
    if source is not None:
        return source
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    if name and (Path(name).is_dir() or name.count("/") == 1):
        return name
    found = f"config._name_or_path is {name!r}, which is no folder" if name else "config._name_or_path is empty"
    raise UsageError(
        f"the source folder of this live model is not known ({found}); it is needed because transformers never loads"
        " the draft head (mtp.*)",
        hint="pass source=FOLDER: the checkpoint folder or hub id that the model was loaded from",
    )


def overlay_of(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Weights of `model` that differ from the files, by checkpoint name, in the checkpoint's dtype.

    Raises UsageError naming every live weight that has no place in the checkpoint, or the wrong shape, or no data.
    """
    layout = layout_for(checkpoint.config, source=str(checkpoint.path))
    state: dict[str, Tensor] = dict(model.state_dict())
    used: set[str] = set()
    problems: list[Problem] = []
    overlay: dict[str, Tensor] = {}
    tied = {"lm_head.weight"} if layout.tied_head else set()
    with ShardReader(checkpoint) as reader, torch.no_grad():
        for name, header in checkpoint.tensors.items():
            key, live = live_view(name, state, layout)
            if key is None or live is None:
                placement = layout.place(name)
                if placement is not None and placement.layer_class not in _MAY_BE_ABSENT and name not in tied:
                    problems.append(Problem(name, "is in the checkpoint but not in the live model"))
                continue
            used.add(key)
            if live.is_meta:
                problems.append(Problem(key, "has no data (meta device): load the model without offloading"))
            elif tuple(live.shape) != header.shape:
                problems.append(Problem(key, f"is {list(live.shape)}, the checkpoint's {name} is {list(header.shape)}"))
            elif (changed := _changed(live, reader.read(name), TORCH_DTYPES[header.dtype])) is not None:
                overlay[name] = changed
    # Weights that several modules share are stored once: a block that several layers run.
    shared = {state[key].data_ptr() for key in used} - {0}
    problems += [
        Problem(key, "is no tensor of the checkpoint: its change would be lost")
        for key in sorted(set(state) - used - tied)
        if state[key].data_ptr() not in shared
    ]
    if problems:
        raise UsageError(
            f"this {type(model).__name__} does not fit {checkpoint.path}",
            hint="merge adapters, undo quantization, and pass the folder that this model was loaded from as source=",
            problems=problems,
        )
    return overlay


def live_view(name: str, state: Mapping[str, Tensor], layout: Layout) -> tuple[str | None, Tensor | None]:
    """The live tensor behind a checkpoint name: itself, a renamed one, rows of one, or a slice of stacked experts."""
    spellings = [name, *(re.sub(pattern, to, name) for pattern, to in layout.live_names)]
    for spelling in spellings:
        key, _, rows = spelling.partition("[")
        if key in state:
            return key, _rows(state[key], rows)
    for spelling in spellings:
        match = _EXPERT.fullmatch(spelling)
        if match is None:
            continue
        stacked, expert, part = match.group(1), int(match.group(2)), match.group(3)
        own, joined = f"{stacked}.{part}_proj", f"{stacked}.gate_up_proj"
        key = own if own in state else joined
        if key in state and expert < state[key].shape[0]:
            matrix = state[key][expert]
            return key, matrix if key == own else matrix.chunk(2, dim=0)[0 if part == "gate" else 1]
    return None, None


def _rows(tensor: Tensor, piece: str) -> Tensor:
    """`a:b]` are those rows of a tensor, `i/n]` the i-th of n equal pieces of it, "" is all of it."""
    if not piece:
        return tensor
    if ":" in piece:
        first, last = map(int, piece.rstrip("]").split(":"))
        return tensor[first:last]
    index, count = map(int, piece.rstrip("]").split("/"))
    length = tensor.shape[0] // count
    return tensor[index * length : (index + 1) * length]


def _changed(live: Tensor, stored: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The live value in the checkpoint's dtype; None when it is the stored one, perhaps seen in another precision."""
    live = live.detach().to("cpu")
    if torch.equal(live, stored.to(live.dtype)):
        return None
    value = live.to(dtype).contiguous()
    return None if torch.equal(value, stored) else value


def overlay_digest(overlay: Mapping[str, Tensor]) -> str:
    """A digest of names and bytes: a resumed job must lay the same weights over its source."""
    hasher = xxhash.xxh3_128()
    for name in sorted(overlay):
        hasher.update(name.encode())
        hasher.update(raw_bytes(overlay[name]))
    return hasher.hexdigest()
