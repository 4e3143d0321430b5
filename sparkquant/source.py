"""Where the weights come from: a folder, a hub id, or a live model laid over the folder that it was loaded from."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError, EnvironmentMissing, UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    Model = str | os.PathLike[str] | nn.Module

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py", "*.md", "LICENSE*", "NOTICE*", "*.yaml")
"""What a snapshot needs; pickle weights and GGUF files stay on the hub."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True)
class Source:
    """A checkpoint and, for a live model, the weights that differ from its files (`overlay`, by checkpoint name)."""

    checkpoint: Checkpoint
    overlay: Mapping[str, Tensor] = field(default_factory=dict)


def locate(model: Model, *, source: str | os.PathLike[str] | None = None) -> Source:
    """Find the checkpoint behind `model`: a local folder, a hub id, or a live module (see `sparkquant.live`)."""
    if isinstance(model, str | os.PathLike):
        return Source(Checkpoint.open(folder_of(model)))
    from sparkquant.live import overlay_of, source_folder

    checkpoint = Checkpoint.open(folder_of(source_folder(model, source)))
    return Source(checkpoint, overlay_of(model, checkpoint))


def local_path(folder: Any) -> Path:
    """The path that a caller means; an error when the system can have no such path, or will not show it."""
    hint = "pass the path of a checkpoint folder"
    if not isinstance(folder, str | os.PathLike):
        raise UsageError(f"a folder is a path, not {type(folder).__name__}", hint=hint)
    try:
        path = Path(folder).expanduser()
        if path.is_dir():
            os.scandir(path).close()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{str(folder)[:200]}: {what}", hint=hint) from None
    return path


def folder_of(model: str | os.PathLike[str]) -> Path:
    """Where a checkpoint lies: a folder, or a hub id, which is downloaded. What is in it is not judged here."""
    path = local_path(model)
    if path.is_dir():
        return path
    text = str(model)
    if path.exists():
        raise CheckpointError(f"{path} is a file", hint="pass the folder that holds config.json and the shards")
    if not _HUB_ID.fullmatch(text) or text.startswith((".", "/")):
        near = _neighbours(path)
        raise CheckpointError(
            f"{path}: no such folder" + (f"; did you mean {near}?" if near else ""),
            hint="pass a folder with config.json and *.safetensors, or a hub id like owner/name",
        )
    return snapshot(text)


def _neighbours(path: Path) -> str | None:
    parent = path.parent
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return str(parent / near[0]) if near else None


def snapshot(repository: str) -> Path:
    """Download (or find in the cache) a hub repository; offline mode is honoured by huggingface_hub itself."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=list(HUB_FILES)))
    except LocalEntryNotFoundError:
        raise EnvironmentMissing(
            f"{repository} is neither a folder nor in the hub cache, and the hub cannot be reached",
            hint="unset HF_HUB_OFFLINE, go online, or pass the path of a local folder",
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{repository}: no such folder here and no such repository on the hub",
            hint="check the spelling; a private repository needs `hf auth login`",
        ) from None
    except (HfHubHTTPError, httpx.HTTPError) as error:
        first = str(error).partition("\n")[0]
        raise EnvironmentMissing(
            f"{repository}: {first}", hint="try again; the download goes on where it stopped"
        ) from None


def as_path(out: Any) -> Path:
    """An output folder from what a caller passed."""
    if out is None or not str(out).strip():
        raise UsageError("no output folder", hint="pass out=... (`-o OUT` on the command line)")
    if not isinstance(out, str | os.PathLike):
        raise UsageError(f"an output folder is a path, not {type(out).__name__}", hint="pass out='FOLDER'")
    try:
        path = Path(out).expanduser().absolute()
        if path.is_dir() or "\0" in str(path):
            path.stat()
    except (OSError, RuntimeError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise UsageError(f"{str(out)[:200]!r}: {what}", hint="choose another output folder") from None
    if not path.name:
        raise UsageError(f"{path} cannot be an output folder", hint="name a new folder")
    return path
