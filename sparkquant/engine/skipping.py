"""Which modules vLLM leaves unquantized, for configs that list names instead of targets (all but compressed-tensors).

Each function repeats the engine's own rule on one of its modules; entries are in the engine's spelling already. What
stops the engine with a ValueError is `Ignored.PARTIAL`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from sparkquant.engine.patterns import Budget, Entries, Pattern
from sparkquant.engine.rules import EngineModel, EngineModule, Ignored

WILD = frozenset("*?[")
T = TypeVar("T")

COMPARISONS = 20_000_000
"""Comparisons that one list may cost: some seconds, a hundred times what real ones need. Beyond it nothing matches."""


def agreed(answers: Iterable[bool]) -> Ignored:
    """One answer for all parts of a fused module, or PARTIAL."""
    found = set(answers)
    if len(found) > 1:
        return Ignored.PARTIAL
    return Ignored.YES if found == {True} else Ignored.NO


class Listed:
    """`is_layer_skipped`: a list of names, compared whole (fp8, ModelOpt) or as a part of a module's name (AWQ).

    Names of experts count for the layer's one module: any of them leaves all experts unquantized.
    """

    def __init__(self, entries: Collection[str], *, as_part: bool = False) -> None:
        self._exact = frozenset(entries)
        self._as_part = as_part
        self._parts = _Substrings(entries) if as_part else None
        self._experts = [entry for entry in entries if "experts" in entry]

    def answer(self, module: EngineModule) -> Ignored:
        """Whether the engine skips a module."""
        if module.is_moe and not self._as_part:
            return agreed([any(module.name in entry for entry in self._experts)])
        return agreed(map(self._has, (module.name,) if module.is_moe else module.shards))

    def _has(self, name: str) -> bool:
        return name in self._exact if self._parts is None else self._parts.inside(name)


class _Substrings:
    """Whether a name contains any of many texts: looked up by every piece of the name where texts are many."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._texts = frozenset(entry for entry in entries if entry)
        self._sizes = sorted({len(text) for text in self._texts})
        self._left = COMPARISONS

    def inside(self, name: str) -> bool:
        self._left -= min(len(self._texts), 32 if len(self._texts) < 32 else len(self._sizes) * len(name))
        if self._left < 0:
            return False
        if len(self._texts) < 32:
            return any(text in name for text in self._texts)
        sizes = [size for size in self._sizes if size <= len(name)]
        return any(name[at : at + size] in self._texts for size in sizes for at in range(len(name) - size + 1))


class ModelOptExclusions:
    """`exclude_modules`: whole names, then parts of a name, then wildcards on the fused name."""

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries = entries
        self._listed = Listed(entries)
        self._parts = _Substrings(entries)
        self._wild = Wildcards(entry for entry in entries if WILD & set(entry))

    def answer(self, module: EngineModule) -> Ignored:
        """Whether the engine skips a module."""
        state = self._listed.answer(module)
        if state is not Ignored.NO:
            return state
        found = self._parts.inside(module.name) or self._wild.fits(module.name)
        return Ignored.YES if found else Ignored.NO


def modelopt_entries(model: EngineModel, entries: Iterable[str]) -> list[str]:
    """Exclusions in the engine's spelling: `path*` becomes `path` and `path.*` before names are mapped."""
    split: list[str] = []
    for entry in entries:
        whole_tree = len(entry) >= 2 and entry[-1] == "*" and entry[-2] != "."
        split += [entry[:-1], f"{entry[:-1]}.*"] if whole_tree else [entry]
    return [model.engine_entry(entry) for entry in split]


class Wildcards:
    """Many fnmatch patterns at once, in time linear in the name."""

    def __init__(self, patterns: Iterable[str]) -> None:
        budget = Budget()
        self._entries = Entries((Pattern(f"re:{wildcard_regex(text)}", budget) for text in patterns), budget)

    def fits(self, name: str) -> bool:
        """Whether any of them matches a whole name."""
        return self._entries.first(name) is not None

    def every(self, name: str) -> list[int]:
        """Positions of all that match."""
        return self._entries.every(name)


def wildcard_regex(pattern: str) -> str:
    """The regular expression of an fnmatch pattern (`*`, `?`, sets in brackets)."""
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        end = _end_of_set(pattern, at) if pattern[at] == "[" else -1
        if end > 0:
            parts.append(_set(pattern[at + 1 : end]))
            at = end
        elif pattern[at] != "*":
            parts.append("." if pattern[at] == "?" else re.escape(pattern[at]))
        elif parts[-1:] != [".*"]:
            parts.append(".*")
        at += 1
    return "".join(parts) + "$"


def _end_of_set(pattern: str, at: int) -> int:
    """Where the bracket of a set closes: not as its first member, which may be `]` itself."""
    at += 1
    at += pattern[at : at + 1] == "!"
    return pattern.find("]", at + 1)


def _set(inner: str) -> str:
    negated = inner.startswith("!")
    members = ""
    text = inner[negated:]
    while text:
        low, high, size = (text[0], text[2], 3) if len(text) > 2 and text[1] == "-" else (text[0], text[0], 1)
        if low <= high:
            members += f"\\U{ord(low):08x}-\\U{ord(high):08x}"
        text = text[size:]
    if not members:
        return "." if negated else r"[^\x00-\U0010ffff]"
    return f"[{'^' if negated else ''}{members}]"


class LayerSettings(Generic[T]):
    """AutoRound's `extra_config` and `block_name_to_quantize`: one setting per module, by name, regex or block.

    exact, regexes  settings by name and by pattern (`re.search`), in the order of the config
    blocks          prefixes of what is quantized; None when everything but lm_head is
    chosen, plain   the setting of a module inside and outside those blocks that nothing names
    """

    def __init__(
        self,
        exact: Mapping[str, T],
        regexes: Sequence[tuple[Pattern, T]],
        blocks: Sequence[str] | None,
        chosen: T,
        plain: T,
    ) -> None:
        self._exact, self._regexes, self._blocks = exact, regexes, tuple(blocks) if blocks else None
        self._chosen, self._plain = chosen, plain
        self._below: dict[str, list[str]] = {}
        for name in exact:
            if ".experts." in name:
                self._below.setdefault(f"{name.partition('.experts.')[0]}.experts", []).append(name)

    def settings(self, module: EngineModule) -> set[T]:
        """All settings that the engine finds for a module; more than one stops it with a ValueError."""
        if module.name in self._exact:
            return {self._exact[module.name]}
        default = self._plain if module.kind == "ParallelLMHead" else self._chosen
        if self._blocks is not None:
            default = self._chosen if module.name.startswith(self._blocks) else self._plain
        if module.is_moe:
            named = {self._exact[name] for name in self._below.get(module.name, ())}
            return named or {self.of_name(module.name, default)}
        return {self.of_name(shard, default) for shard in module.shards}

    def of_name(self, name: str, default: T) -> T:
        """The setting of one unfused name."""
        if name in self._exact:
            return self._exact[name]
        return next((setting for regex, setting in self._regexes if regex.matches(name)), default)


class GptqLayers:
    """The list of quantized modules that vLLM derives from the dtypes in the files, for GPTQ."""

    def __init__(self, layers: Iterable[str]) -> None:
        known = list(layers)
        self._layers = _Substrings(known)
        self._experts = {f"{name.partition('.experts.')[0]}.experts" for name in known if ".experts." in name}

    def answer(self, module: EngineModule) -> Ignored:
        """Whether a module is left unquantized; experts by what is stored below them."""
        if module.is_moe:
            return Ignored.NO if module.name in self._experts else Ignored.YES
        return agreed(not self._layers.inside(shard) for shard in module.shards)
