"""What a `quantization_config` says, in one form for all producers: groups, names, and everything wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sparkquant.checkpoint import Checkpoint
from sparkquant.engine.rules import EngineModel, EngineModule, Ignored
from sparkquant.formats.stored import StoredModule, StoredScheme, modules_of

MAX_ENTRIES = 200_000
"""Targets or ignore entries that are looked at; published lists have a few thousand at most."""

MALFORMED, ACTORDER, FORMAT, UNSUPPORTED = "malformed", "actorder", "format", "unsupported"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a config: its kind, the key where it is, and what is wrong."""

    kind: str
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Group:
    """Modules of one scheme; `scheme` is None when it cannot be understood (a Fault says why).

    targets  patterns in the order of the config; empty for producers that have none
    """

    name: str
    targets: tuple[str, ...]
    scheme: StoredScheme | None
    format: str


Answer = tuple[Ignored, tuple[Group | None, ...]]
"""Whether a module is left unquantized, and if not the group of each part that the engine looks up."""


class Names(Protocol):
    """Which module takes which group, for producers whose config has no targets.

    entries  the names and wildcards that the config lists, as the engine compares them
    """

    @property
    def entries(self) -> Sequence[str]: ...

    def answer(self, model: EngineModel, module: EngineModule) -> Answer:
        """What the engine makes of one of its modules."""
        ...

    def group_of(self, module: str) -> Group | None:
        """The group with which a module that is stored quantized is read, by its name in the checkpoint."""
        ...


@dataclass(frozen=True)
class Declaration:
    """A whole `quantization_config`, with everything that is wrong with it as data.

    names  None where targets and `ignore` decide (compressed-tensors)
    """

    groups: tuple[Group, ...] = ()
    ignore: tuple[str, ...] = ()
    kv_cache: bool = False
    faults: tuple[Fault, ...] = ()
    names: Names | None = None


def kind_of(value: Any) -> str:
    """The type of a JSON value in words."""
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "a boolean"}
    return "absent" if value is None else names.get(type(value), type(value).__name__)


def texts(value: Any, where: str, faults: list[Fault]) -> tuple[str, ...]:
    """A list of names; what is something else is a fault and left out."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        faults.append(Fault(MALFORMED, where, f"is {kind_of(value)}, not a list of names"))
        return ()
    if len(value) > MAX_ENTRIES:
        faults.append(Fault(MALFORMED, where, f"has {len(value):,} entries"))
        return ()
    wrong = next((item for item in value if not isinstance(item, str)), None)
    if wrong is not None:
        faults.append(Fault(MALFORMED, where, f"holds {kind_of(wrong)} where a name is needed"))
    return tuple(item for item in value if isinstance(item, str))


def take(fields: Mapping[str, Any], key: str, kind: type, default: Any, faults: list[Fault], where: str = "") -> Any:
    """A field of one type; the default when it is absent, a fault too when it is something else."""
    value = fields.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        faults.append(Fault(MALFORMED, f"{where}{key}", f"is {kind_of(value)}"))
        return default
    return value


def by_names(checkpoint: Checkpoint, scheme_of: Callable[[str], StoredScheme | None]) -> dict[str, StoredModule]:
    """Every module, with a scheme where the tensors are of the quantized kind and one is declared."""
    found: dict[str, StoredModule] = {}
    for name, tensors in modules_of(checkpoint.tensors).items():
        module = StoredModule(name, tensors)
        scheme = scheme_of(name) if module.is_quantized else None
        found[name] = module if scheme is None else StoredModule(name, tensors, scheme)
    return found


def modules_by_group(checkpoint: Checkpoint, names: Names | None) -> dict[str, StoredModule]:
    """`by_names` with the schemes of a config's groups."""

    def scheme_of(module: str) -> StoredScheme | None:
        group = names.group_of(module) if names is not None else None
        return None if group is None else group.scheme

    return by_names(checkpoint, scheme_of)


def integer_group_size(value: Any, where: str, faults: list[Fault]) -> int | None:
    """-1 or a positive size; None after a fault."""
    if type(value) is int and (value == -1 or 0 < value < 2**31):
        return int(value)
    faults.append(Fault(MALFORMED, where, f"is {str(value)[:40]}: -1 or a positive number is needed"))
    return None


def distinct(groups: Iterable[Group | None]) -> tuple[Group | None, ...]:
    """Groups without repetition."""
    return tuple(dict.fromkeys(groups))
