"""How each engine version resolves each module: ignored, or which group, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkquant.engine.rules import EngineModule, Ignored, ignored, matched_target
from sparkquant.formats.declaration import Group
from sparkquant.formats.stored import StoredScheme
from sparkquant.verification.subject import Subject


@dataclass(frozen=True, slots=True)
class Resolution:
    """What one engine version makes of one module.

    groups  one group for a Linear; gate's, up's and down's for experts; empty when the module is ignored
    """

    ignored: Ignored
    groups: tuple[Group | None, ...]

    @property
    def group(self) -> Group | None:
        """The group whose scheme the engine builds; None for an unquantized module."""
        return self.groups[0] if self.groups else None

    @property
    def built(self) -> frozenset[Built]:
        """What the engine would build: comparable over versions and groups."""
        return frozenset(map(built, self.groups)) or frozenset({None})


Built = tuple[StoredScheme | None, str] | None


def built(group: Group | None) -> Built:
    """What a group stands for; two groups of one scheme are the same to the engine."""
    return None if group is None else (group.scheme, group.format)


def resolve(subject: Subject, module: EngineModule, version: str) -> Resolution:
    """One module in one version."""
    view = subject.view_in(version)
    names = subject.declared.names if subject.declared is not None else None
    if names is not None:
        return Resolution(*names.answer(view.model, module))
    state = ignored(module, view.ignore, version)
    if state is not Ignored.NO:
        return Resolution(state, ())
    found = matched_target(module, view.targets, version)
    return Resolution(state, tuple(None if hit is None else subject.target_groups[hit] for hit in found))


def resolutions(subject: Subject) -> Mapping[str, Mapping[str, Resolution]]:
    """By engine module, then by version."""
    return {
        module.name: {version: _resolved_elsewhere(subject, module, version) for version in subject.versions}
        for module in subject.engine_modules
    }


def _resolved_elsewhere(subject: Subject, module: EngineModule, version: str) -> Resolution:
    """What a version makes of the members of a module, which it may spell or fuse otherwise."""
    view = subject.view_in(version)
    if view is subject.view:
        return resolve(subject, module, version)
    others = dict.fromkeys(view.module_of[member] for member in module.members if member in view.module_of)
    found = [resolve(subject, other, version) for other in others]
    states = {resolution.ignored for resolution in found}
    state = states.pop() if len(states) == 1 else Ignored.PARTIAL if states else Ignored.YES
    return Resolution(state, tuple(group for resolution in found for group in resolution.groups))


def named_group(name: str, subject: Subject) -> Group | None:
    """The group of the first target that matches a name; class names are left aside."""
    found = subject.targets.first(name)
    return None if found is None else subject.target_groups[found]


def groups_naming(names: Sequence[str], subject: Subject) -> set[str]:
    """All groups with a target for one of these names."""
    return {subject.target_groups[index].name for name in names for index in subject.targets.every(name)}
