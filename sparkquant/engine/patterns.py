"""Name patterns of a quantization config, matched in time linear in the name whatever the pattern.

Configs come from strangers, and `re` takes exponential time on patterns like `(a*)*b`. A pattern therefore runs as a
finite automaton (a look-ahead at its beginning is a second one). What an automaton cannot express goes to `re` only
when it is too small to explode, and is refused otherwise.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any, overload

from sparkquant.engine.automaton import Budget, Inexpressible, Matcher, PatternError

__all__ = ["Budget", "Entries", "Pattern", "PatternError", "Regex", "compile_regex"]

MAX_PATTERN = 2_000
"""Characters of one pattern; the longest published one has a few hundred."""

MAX_BACKTRACKING_NAME = 300


def _repeats(tree: Any, inside: bool = False) -> int:
    """How many open-ended repetitions a parsed pattern has; PatternError when one lies inside another."""
    count = 0
    for operation, argument in tree:
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            if inside:
                raise PatternError("nested repetition with look-around could take exponential time")
            count += 1 + _repeats(argument[2], True)
        elif operation is sre.BRANCH:
            count += sum(_repeats(branch, inside) for branch in argument[1])
        elif operation is sre.SUBPATTERN:
            count += _repeats(argument[3], inside)
        elif operation in (sre.ASSERT, sre.ASSERT_NOT):
            count += _repeats(argument[1], inside)
        elif operation is sre.ATOMIC_GROUP:
            count += _repeats(argument, inside)
        elif operation in (sre.GROUPREF, sre.GROUPREF_EXISTS):
            raise PatternError("back-references are not used in name patterns")
    return count


@dataclass(frozen=True)
class Regex:
    """A checked pattern. `tree` is its parse where one automaton can run it; `matches` always works."""

    matches: Callable[[str], bool]
    tree: Any = None


def _anchored(items: list[Any], budget: Budget) -> Regex:
    """All look-aheads at the beginning and the rest of the pattern, each matched from the first character."""
    demands: list[tuple[Matcher, bool]] = []
    rest = list(items)
    while rest and rest[0][0] in (sre.ASSERT, sre.ASSERT_NOT) and rest[0][1][0] == 1:
        operation, (_, inner) = rest.pop(0)
        demands.append((Matcher([inner], budget), operation is sre.ASSERT))
    matcher = Matcher([rest], budget)
    if not demands:
        return Regex(lambda name: bool(matcher(name)), rest)
    return Regex(lambda name: all(bool(demand(name)) is wanted for demand, wanted in demands) and bool(matcher(name)))


def compile_regex(pattern: str, budget: Budget | None = None) -> Regex:
    """`re.match(pattern, name) is not None` in bounded time; PatternError when that cannot be promised.

    `$` is the very end: names have no line breaks.
    """
    budget = budget or Budget()
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"{len(pattern):,} characters are no plausible name pattern")
    budget.spend(25 * len(pattern))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = sre_parser.parse(pattern)
        if tree.state.flags & ~sre.SRE_FLAG_UNICODE:
            raise Inexpressible
        return _anchored(list(tree), budget)
    except (re.error, OverflowError) as error:
        raise PatternError(f"not a regular expression: {error}") from None
    except RecursionError:
        raise PatternError("the pattern is nested too deeply") from None
    except Inexpressible:
        pass
    if _repeats(tree) > 2:
        raise PatternError("more than two repetitions beside look-around or flags could take very long")
    compiled = re.compile(pattern)
    return Regex(lambda name: len(name) <= MAX_BACKTRACKING_NAME and compiled.match(name) is not None)


class Pattern:
    """One entry of `targets` or `ignore`: `re:` + regular expression (`re.match`), or an exact name. No globs.

    text   the entry as the engine compares it (renamed where the engine renames)
    fault  why the entry cannot be used; it then matches nothing
    """

    def __init__(self, text: str, budget: Budget | None = None) -> None:
        self.text = text
        self.fault = ""
        self.regex: Regex | None = None
        if text.startswith("re:"):
            try:
                self.regex = compile_regex(text[3:], budget)
            except PatternError as error:
                self.fault = str(error)

    @property
    def is_regex(self) -> bool:
        """Begins with `re:`."""
        return self.text.startswith("re:")

    def matches(self, name: str) -> bool:
        """Whether the engine takes this entry for this name."""
        if not self.is_regex:
            return self.text == name
        try:
            return self.regex is not None and self.regex.matches(name)
        except PatternError as error:
            self.fault, self.regex = str(error), None
            return False


class Entries(Sequence[Pattern]):
    """A `targets` or `ignore` list in its order; exact names are found without walking the list."""

    def __init__(self, patterns: Iterable[Pattern], budget: Budget | None = None) -> None:
        self._all = list(patterns)
        self._exact: dict[str, list[int]] = {}
        self._classes: dict[str, int | None] = {}
        self._known: dict[str, list[int]] = {}
        for index, pattern in enumerate(self._all):
            if not pattern.is_regex:
                self._exact.setdefault(pattern.text, []).append(index)
        regexes = [(index, pattern) for index, pattern in enumerate(self._all) if pattern.regex is not None]
        together = [(index, pattern) for index, pattern in regexes if pattern.regex and pattern.regex.tree is not None]
        self._alone = regexes
        self._matcher: Matcher | None = None
        self._together = [index for index, _ in together]
        try:
            self._matcher = Matcher([p.regex.tree for _, p in together if p.regex], budget or Budget())
            self._alone = [(index, pattern) for index, pattern in regexes if index not in set(self._together)]
        except PatternError:
            pass  # too many for one automaton: each runs alone

    def __len__(self) -> int:
        return len(self._all)

    @overload
    def __getitem__(self, index: int) -> Pattern: ...

    @overload
    def __getitem__(self, index: slice) -> list[Pattern]: ...

    def __getitem__(self, index: int | slice) -> Pattern | list[Pattern]:
        return self._all[index]

    def _regexes(self, name: str) -> list[int]:
        """Positions of the regular expressions that match, in order."""
        found = self._known.get(name)
        if found is None:
            found = [index for index, pattern in self._alone if pattern.matches(name)]
            if self._matcher is not None:
                found += self._matched_together(self._matcher, name)
            found = self._known[name] = sorted(found)
        return found

    def _matched_together(self, matcher: Matcher, name: str) -> list[int]:
        try:
            return [self._together[position] for position in matcher(name)]
        except PatternError as error:
            for index in self._together:
                self._all[index].fault, self._all[index].regex = str(error), None
            self._matcher = None
            return []

    def first(self, name: str, *, exact_only: bool = False) -> int | None:
        """Position of the first entry that matches a name."""
        found = [*self._exact.get(name, ())[:1], *(() if exact_only else self._regexes(name)[:1])]
        return min(found, default=None)

    def every(self, name: str) -> list[int]:
        """Positions of all entries that match a name."""
        return [*self._exact.get(name, ()), *self._regexes(name)]

    def first_class(self, class_name: str) -> int | None:
        """Position of the first entry that matches a module class; plain entries match as a part of its name."""
        if class_name not in self._classes:
            lower = class_name.lower()
            exact = [indexes[0] for text, indexes in self._exact.items() if text.lower() in lower]
            self._classes[class_name] = min([*exact, *self._regexes(class_name)[:1]], default=None)
        return self._classes[class_name]
