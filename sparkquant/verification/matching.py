"""targets and ignore under the engine's own rules, in every supported version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from sparkquant.engine.patterns import Entries, Pattern
from sparkquant.engine.rules import EngineModule, Ignored
from sparkquant.engine.skipping import WILD, Wildcards
from sparkquant.report import Check
from sparkquant.verification.catalogue import finding, skipped
from sparkquant.verification.resolution import Resolution, built, groups_naming, named_group, resolutions
from sparkquant.verification.subject import Subject

FAMILY_WIDE = (r"re:.*mtp\..*", r"re:.*mtp\.fc$", r"re:.*lm_head$", "lm_head")
"""Ignore entries that are always right to have, whether or not this checkpoint has such modules."""

_FUSED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")

IDS = (
    "rules.pattern", "rules.glob", "rules.unanchored", "rules.class_target", "rules.overlap", "rules.order",
    "rules.partial_ignore", "rules.split_scheme", "rules.dead_target", "rules.dead_ignore",
)  # fmt: skip


OF_TARGETS = (
    "rules.pattern", "rules.glob", "rules.unanchored", "rules.class_target", "rules.overlap", "rules.order",
    "rules.dead_target",
)  # fmt: skip
"""Checks that only make sense where patterns are matched in an order."""


def check_rules(subject: Subject) -> Iterator[Check]:
    """rules.*"""
    if subject.declared is None:
        yield from skipped("config.json has no quantization_config", *IDS)
        return
    if subject.serving.engine is not None:
        yield from skipped("one engine version was named", "rules.order")
    rules = _Rules(subject)
    if subject.declared.names is None:
        yield from rules.entries()
    else:
        yield from skipped("compressed-tensors alone has targets and patterns", *OF_TARGETS)
        yield from dead_names(subject, subject.declared.names.entries)
    yield from rules.modules()
    faults = [p for p in (*subject.ignore, *subject.targets) if p.fault]
    if faults:
        yield finding("rules.pattern", faults[0].fault, [pattern.text for pattern in faults])


def dead_names(subject: Subject, entries: Sequence[str]) -> Iterator[Check]:
    """Listed names and wildcards (no `re:`) that fit nothing stored, in neither spelling."""
    names = {spelled for name in subject.modules for spelled in (name, subject.engine.engine_name(name))}
    paths = {parent for name in names for parent in _paths(name)}
    loose = [entry for entry in entries if entry not in paths and not any(word in entry for word in _EVERYWHERE)]
    if len(loose) * len(names) > MAX_COMPARED:
        return
    wild = [entry for entry in loose if WILD & set(entry)]
    wildcards = Wildcards(wild)
    used = {wild[index] for name in names for index in wildcards.every(name)} if wild else set()
    dead = [entry for entry in loose if entry not in used and not any(entry in name for name in names)]
    if dead:
        yield finding("rules.dead_ignore", f"{dead[0]!r} fits no module", dead)


_EVERYWHERE = ("lm_head", "mtp", "visual", "vision", "embed", "norm")
MAX_COMPARED = 10_000_000


def _paths(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


class _Rules:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.by_module = resolutions(subject)

    @cached_property
    def engine_names(self) -> Mapping[str, None]:
        """All names under which some version asks about a module."""
        names: dict[str, None] = {}
        for module in self.subject.engine_modules:
            names.update(dict.fromkeys((module.name, *module.shards)))
            names.update(dict.fromkeys(map(self.subject.engine.engine_name, module.members)))
        return names

    @cached_property
    def unasked(self) -> Mapping[str, None]:
        """Modules that never take a scheme: naming them is harmless."""
        names = (name for name in self.subject.modules if not self.subject.engine.takes_scheme(name))
        return {spelled: None for name in names for spelled in (name, self.subject.engine.engine_name(name))}

    @cached_property
    def kinds(self) -> set[str]:
        """The engine's class names."""
        return {module.kind for module in self.subject.engine_modules}

    def entries(self) -> Iterator[Check]:
        """Single entries that cannot mean what they say."""
        targets = self.subject.targets
        globs = [p for p in (*targets, *self.subject.ignore) if not p.is_regex and set("*?[") & set(p.text)]
        glob_texts = {pattern.text: None for pattern in globs}
        if globs:
            what = f"{globs[0].text!r} matches nothing: patterns begin with `re:`"
            yield finding("rules.glob", what, glob_texts)
        classes = [p for p in targets if self._is_class(p)]
        if classes and len({group.name for group in self.subject.target_groups}) > 1:
            what = f"{classes[0].text!r} beside other groups: versions resolve class names in different order"
            yield finding("rules.class_target", what, [pattern.text for pattern in classes])
        dead = [p for p in self._dead(targets) if p.text not in glob_texts and not self._is_alias(p)]
        ignore = [p for p in self._dead(self.subject.ignore) if p.text not in glob_texts]
        ignore = [pattern for pattern in ignore if not self._is_family_wide(pattern)]
        missed = [p for p in (*dead, *ignore) if self._misses(p)]
        if missed:
            what = f"{missed[0].text!r} matches nothing: matching starts at the name's beginning, so begin with `re:.*`"
            yield finding("rules.unanchored", what, [pattern.text for pattern in missed])
        yield from self._useless(dead, ignore, missed)

    def _useless(
        self, dead: Sequence[Pattern], ignore: Sequence[Pattern], missed: Sequence[Pattern]
    ) -> Iterator[Check]:
        for id, patterns in (("rules.dead_target", dead), ("rules.dead_ignore", ignore)):
            texts = [pattern.text for pattern in patterns if pattern not in missed]
            if texts:
                yield finding(id, f"{texts[0]!r} matches no module in the engine's spelling", texts)

    def _is_class(self, pattern: Pattern) -> bool:
        if pattern.is_regex or "." in pattern.text or pattern.text in self.subject.modules:
            return False
        return any(pattern.text.lower() in kind.lower() for kind in self.kinds)

    def _dead(self, entries: Entries) -> list[Pattern]:
        """Entries that match no name and no class."""
        used = {index for name in self.engine_names for index in entries.every(name)}
        return [p for i, p in enumerate(entries) if i not in used and not p.fault and not self._is_class(p)]

    def _is_alias(self, pattern: Pattern) -> bool:
        layout = self.subject.layout
        return layout is not None and any(a in pattern.text for rule in layout.rules for a in rule.aliases)

    def _is_family_wide(self, pattern: Pattern) -> bool:
        """Right for the whole family, or naming a module that the engine never asks about."""
        layout = self.subject.layout
        if pattern.text in FAMILY_WIDE or (layout is not None and pattern.text in layout.ignore_always):
            return True
        if not pattern.is_regex:
            return pattern.text in self.unasked
        return any(pattern.matches(name) for name in self.unasked)

    def _misses(self, pattern: Pattern) -> bool:
        if not pattern.is_regex or pattern.text.startswith(("re:.*", "re:^")):
            return False
        loose = self.subject.pattern(f"re:.*(?:{pattern.text[3:]})")
        return not loose.fault and any(loose.matches(name) for name in self.engine_names)

    def modules(self) -> Iterator[Check]:
        """Modules that the engine would refuse or read wrongly."""
        partial: list[str] = []
        split: list[str] = []
        order: list[str] = []
        overlap: list[str] = []
        for module in self.subject.engine_modules:
            found = self.by_module[module.name]
            if self._is_partial(module, found.values()):
                partial.append(module.name)
            elif self._is_split(module, found[self.subject.version]):
                split.append(module.name)
            elif len({r.built for r in found.values()}) > 1:
                order.append(module.name)
            elif any(r.group for r in found.values()) and self._overlaps(module):
                overlap.append(module.name)
        if partial:
            yield finding("rules.partial_ignore", "some parts are ignored, others not: the engine raises", partial)
        if split:
            yield finding("rules.split_scheme", "parts resolve to different groups; the engine takes the first", split)
        if order:
            versions = ", ".join(self.subject.versions)
            yield finding("rules.order", f"versions {versions} resolve these differently", order)
        if overlap:
            yield finding("rules.overlap", "targets of several groups match", overlap)

    def _member_names(self, module: EngineModule) -> list[str]:
        """Engine spelling of the parts that are looked up; nobody asks for a fused 3-D expert tensor by its name."""
        return [self.subject.engine.engine_name(name) for name in module.members if not name.endswith(_FUSED_EXPERTS)]

    def _is_partial(self, module: EngineModule, found: Iterable[Resolution]) -> bool:
        if any(resolution.ignored is Ignored.PARTIAL for resolution in found):
            return True
        if not module.is_moe:
            return False
        flags = {self.subject.ignore.first(name) is not None for name in self._member_names(module)}
        return len(flags) > 1

    def _is_split(self, module: EngineModule, base: Resolution) -> bool:
        if base.ignored is not Ignored.NO or len(module.members) < 2:
            return False
        own = {built(named_group(name, self.subject) or base.group) for name in self._member_names(module)}
        # Of all versions together rules.order says that one reads the whole module unlike its parts.
        named = self.subject.serving.engine is not None and self.subject.targets
        return len(base.built) > 1 or len(own) > 1 or (bool(named) and own != base.built)

    def _overlaps(self, module: EngineModule) -> bool:
        return len(groups_naming([module.name, *self._member_names(module)], self.subject)) > 1
