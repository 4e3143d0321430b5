"""Name patterns of a quantization config, matched in time linear in the name whatever the pattern.

Configs come from strangers, and `re` takes exponential time on patterns like `(a*)*b`. A pattern is therefore run as a
finite automaton that is built while names are read (a look-ahead at its beginning is a second one). What an automaton
cannot express goes to `re` only when it is too small to explode, and is refused otherwise.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any, overload

MAX_PATTERN = 2_000
"""Characters of one pattern; the longest published one has a few hundred."""

MAX_NODES = 4_000
MAX_CACHED_STATES = 500
MAX_BACKTRACKING_NAME = 300

MATCHING_STEPS = 50_000_000
"""Work that all patterns of one config may cost together: some ten seconds, a hundred times what real ones need."""

Test = Callable[[str], bool]
_CATEGORY: Mapping[Any, Test] = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    sre.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    sre.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}


class PatternError(ValueError):
    """A pattern that is no regular expression, or one that could take unbounded time."""


class Budget:
    """Steps that are left for matching; PatternError when they are used up."""

    def __init__(self, steps: int = MATCHING_STEPS) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        """Take steps off."""
        self.left -= steps
        if self.left < 0:
            raise PatternError("the patterns of this config take too long to match")


class _Inexpressible(Exception):
    """The automaton has no state for this construct."""


class _Automaton:
    """Thompson's construction: node i either tests one character and goes to `next`, or has free moves."""

    def __init__(self, tree: Any) -> None:
        self.tests: list[Test | None] = []
        self.next: list[int] = []
        self.moves: list[tuple[tuple[str, int], ...]] = []
        self.accept = self._node()
        self.start = self._sequence(list(tree), self.accept)

    def _node(self, test: Test | None = None, to: int = -1, moves: Iterable[tuple[str, int]] = ()) -> int:
        if len(self.tests) >= MAX_NODES:
            raise PatternError("the pattern is too large")
        self.tests.append(test)
        self.next.append(to)
        self.moves.append(tuple(moves))
        return len(self.tests) - 1

    def _sequence(self, items: list[Any], then: int) -> int:
        for operation, argument in reversed(items):
            then = self._item(operation, argument, then)
        return then

    def _item(self, operation: Any, argument: Any, then: int) -> int:
        if operation is sre.BRANCH:
            starts = [self._sequence(list(branch), then) for branch in argument[1]]
            return self._node(moves=[("", start) for start in starts])
        if operation is sre.SUBPATTERN:
            _, added, removed, inner = argument
            if added or removed:
                raise _Inexpressible
            return self._sequence(list(inner), then)
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, inner = argument
            return self._repeat(low, high, inner, then)
        if operation is sre.AT and argument in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
            return self._node(moves=[("start", then)])
        if operation is sre.AT and argument in (sre.AT_END, sre.AT_END_STRING):
            return self._node(moves=[("end", then)])
        return self._node(_test(operation, argument), then)

    def _repeat(self, low: int, high: int, inner: Any, then: int) -> int:
        items = list(inner)
        if high is sre.MAXREPEAT:
            loop = self._node()
            self.moves[loop] = (("", self._sequence(items, loop)), ("", then))
            then = loop
        else:
            for _ in range(high - low):
                then = self._node(moves=[("", self._sequence(items, then)), ("", then)])
        for _ in range(low):
            then = self._sequence(items, then)
        return then

    def closure(self, nodes: Iterable[int], conditions: frozenset[str]) -> frozenset[int]:
        """All nodes that are reachable without reading a character."""
        found = set(nodes)
        todo = list(found)
        while todo:
            for condition, target in self.moves[todo.pop()]:
                if target not in found and (not condition or condition in conditions):
                    found.add(target)
                    todo.append(target)
        return frozenset(found)


def _test(operation: Any, argument: Any) -> Test:
    if operation is sre.LITERAL:
        wanted = chr(argument)
        return lambda c: c == wanted
    if operation is sre.NOT_LITERAL:
        unwanted = chr(argument)
        return lambda c: c != unwanted
    if operation is sre.ANY:
        return lambda c: c != "\n"
    if operation is sre.CATEGORY and argument in _CATEGORY:
        return _CATEGORY[argument]
    if operation is sre.RANGE:
        low, high = argument
        return lambda c: low <= ord(c) <= high
    if operation is sre.IN:
        negate = bool(argument) and argument[0][0] is sre.NEGATE
        tests = [_test(*item) for item in (argument[1:] if negate else argument)]
        return lambda c: any(test(c) for test in tests) != negate
    raise _Inexpressible


@dataclass
class _State:
    nodes: frozenset[int]
    accepts: bool
    accepts_at_end: bool
    to: dict[str, _State] = field(default_factory=dict)


class _Matcher:
    """`re.match` for one automaton: states are made when a name first needs them, and dropped when there are many."""

    def __init__(self, automaton: _Automaton, budget: Budget) -> None:
        self._automaton = automaton
        self._budget = budget
        self._states: dict[frozenset[int], _State] = {}
        self._first = self._state(frozenset({automaton.start}), frozenset({"start"}))

    def _state(self, seeds: frozenset[int], conditions: frozenset[str] = frozenset()) -> _State:
        automaton = self._automaton
        nodes = automaton.closure(seeds, conditions)
        self._budget.spend(2 * len(nodes))
        known = self._states.get(nodes)
        if known is not None and not conditions:
            return known
        at_end = automaton.closure(nodes, conditions | {"end"})
        state = _State(nodes, automaton.accept in nodes, automaton.accept in at_end)
        if not conditions:
            if len(self._states) >= MAX_CACHED_STATES:
                self._states.clear()
                self._first.to.clear()
            self._states[nodes] = state
        return state

    def __call__(self, name: str) -> bool:
        self._budget.spend(len(name))
        state = self._first
        for character in name:
            if state.accepts:
                return True
            following = state.to.get(character)
            if following is None:
                tests, to = self._automaton.tests, self._automaton.next
                reached = frozenset(
                    to[node] for node in state.nodes if (test := tests[node]) is not None and test(character)
                )
                following = self._state(reached)
                state.to[character] = following
            state = following
            if not state.nodes:
                return False
        return state.accepts_at_end


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


def _anchored(items: list[Any], budget: Budget) -> Callable[[str], bool]:
    """All look-aheads at the beginning and the rest of the pattern, each matched from the first character."""
    demands: list[tuple[_Matcher, bool]] = []
    while items and items[0][0] in (sre.ASSERT, sre.ASSERT_NOT) and items[0][1][0] == 1:
        operation, (_, inner) = items.pop(0)
        demands.append((_Matcher(_Automaton(inner), budget), operation is sre.ASSERT))
    matcher = _Matcher(_Automaton(items), budget)
    if not demands:
        return matcher
    return lambda name: all(demand(name) is wanted for demand, wanted in demands) and matcher(name)


def compile_regex(pattern: str, budget: Budget | None = None) -> Callable[[str], bool]:
    """`re.match(pattern, name) is not None` in bounded time; PatternError when that cannot be promised."""
    budget = budget or Budget()
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"{len(pattern):,} characters are no plausible name pattern")
    budget.spend(25 * len(pattern))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = sre_parser.parse(pattern)
        if tree.state.flags & ~sre.SRE_FLAG_UNICODE:
            raise _Inexpressible
        return _anchored(list(tree), budget)
    except (re.error, OverflowError) as error:
        raise PatternError(f"not a regular expression: {error}") from None
    except RecursionError:
        raise PatternError("the pattern is nested too deeply") from None
    except _Inexpressible:
        pass
    if _repeats(tree) > 2:
        raise PatternError("more than two repetitions beside look-around or flags could take very long")
    compiled = re.compile(pattern)
    return lambda name: len(name) <= MAX_BACKTRACKING_NAME and compiled.match(name) is not None


class Pattern:
    """One entry of `targets` or `ignore`: `re:` + regular expression (`re.match`), or an exact name. No globs.

    text   the entry as the engine compares it (renamed where the engine renames)
    fault  why the entry cannot be used; it then matches nothing
    """

    def __init__(self, text: str, budget: Budget | None = None) -> None:
        self.text = text
        self.fault = ""
        self._matcher: Callable[[str], bool] | None = None
        self._known: dict[str, bool] = {}
        if text.startswith("re:"):
            try:
                self._matcher = compile_regex(text[3:], budget)
            except PatternError as error:
                self.fault = str(error)

    @property
    def is_regex(self) -> bool:
        """Begins with `re:`."""
        return self.text.startswith("re:")

    def matches(self, name: str) -> bool:
        """Whether the engine takes this entry for this name."""
        if self._matcher is None:
            return not self.is_regex and self.text == name
        found = self._known.get(name)
        if found is None:
            try:
                found = self._matcher(name)
            except PatternError as error:
                self.fault, self._matcher = str(error), None
                return False
            self._known[name] = found
        return found



class Entries(Sequence[Pattern]):
    """A `targets` or `ignore` list in its order; exact names are found without walking the list."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self._all = list(patterns)
        self._exact: dict[str, list[int]] = {}
        self._classes: dict[str, int | None] = {}
        self._regexes = [(index, pattern) for index, pattern in enumerate(self._all) if pattern.is_regex]
        for index, pattern in enumerate(self._all):
            if not pattern.is_regex:
                self._exact.setdefault(pattern.text, []).append(index)

    def __len__(self) -> int:
        return len(self._all)

    @overload
    def __getitem__(self, index: int) -> Pattern: ...

    @overload
    def __getitem__(self, index: slice) -> list[Pattern]: ...

    def __getitem__(self, index: int | slice) -> Pattern | list[Pattern]:
        return self._all[index]

    def first(self, name: str, *, exact_only: bool = False) -> int | None:
        """Position of the first entry that matches a name."""
        exact = self._exact.get(name)
        regexes = () if exact_only else self._regexes
        limit = exact[0] if exact else len(self._all)
        found = next((index for index, pattern in regexes if index < limit and pattern.matches(name)), limit)
        return found if found < len(self._all) else None

    def every(self, name: str) -> list[int]:
        """Positions of all entries that match a name."""
        return [*self._exact.get(name, ()), *(index for index, pattern in self._regexes if pattern.matches(name))]

    def first_class(self, class_name: str) -> int | None:
        """Position of the first entry that matches a module class; plain entries match as a part of its name."""
        if class_name not in self._classes:
            lower = class_name.lower()
            exact = [indexes[0] for text, indexes in self._exact.items() if text.lower() in lower]
            regexes = [index for index, pattern in self._regexes if pattern.matches(class_name)]
            self._classes[class_name] = min([*exact, *regexes], default=None)
        return self._classes[class_name]
