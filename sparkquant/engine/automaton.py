"""Regular expressions as finite automata that are built while names are read: linear time, whatever the pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any

MAX_NODES = 4_000
MAX_CACHED_STATES = 500

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


class Inexpressible(Exception):
    """The automaton has no state for this construct."""


class Automaton:
    """Thompson's construction for several patterns at once: a node tests one character, or has free moves."""

    def __init__(self, trees: Sequence[Any]) -> None:
        self.tests: list[Test | None] = []
        self.next: list[int] = []
        self.moves: list[tuple[tuple[str, int], ...]] = []
        self.accepts = {self._node(): index for index in range(len(trees))}
        ends = list(self.accepts)
        self.starts = frozenset(self._sequence(list(tree), end) for end, tree in zip(ends, trees, strict=True))

    def accepted(self, nodes: Iterable[int]) -> frozenset[int]:
        """Positions of the patterns that have matched in these nodes."""
        return frozenset(self.accepts[node] for node in nodes if node in self.accepts)

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
                raise Inexpressible
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
    raise Inexpressible


@dataclass
class _State:
    nodes: frozenset[int]
    accepts: frozenset[int]
    accepts_at_end: frozenset[int]
    to: dict[str, _State] = field(default_factory=dict)


class Matcher:
    """`re.match` for several patterns in one pass over a name; states are made when a name first needs them."""

    def __init__(self, trees: Sequence[Any], budget: Budget) -> None:
        self._automaton = Automaton(trees)
        self._count = len(trees)
        self._budget = budget
        self._states: dict[frozenset[int], _State] = {}
        self._first = self._state(self._automaton.starts, frozenset({"start"}))

    def _state(self, seeds: frozenset[int], conditions: frozenset[str] = frozenset()) -> _State:
        automaton = self._automaton
        nodes = automaton.closure(seeds, conditions)
        self._budget.spend(2 * len(nodes))
        known = self._states.get(nodes)
        if known is not None and not conditions:
            return known
        at_end = automaton.closure(nodes, conditions | {"end"})
        state = _State(nodes, automaton.accepted(nodes), automaton.accepted(at_end))
        if not conditions:
            if len(self._states) >= MAX_CACHED_STATES:
                self._states.clear()
                self._first.to.clear()
            self._states[nodes] = state
        return state

    def _following(self, state: _State, character: str) -> _State:
        tests, to = self._automaton.tests, self._automaton.next
        reached = frozenset(to[node] for node in state.nodes if (test := tests[node]) is not None and test(character))
        following = state.to[character] = self._state(reached)
        return following

    def __call__(self, name: str) -> frozenset[int]:
        """Positions of the patterns that match."""
        self._budget.spend(len(name))
        state = self._first
        found = state.accepts
        for character in name:
            if len(found) == self._count:
                return found
            state = state.to.get(character) or self._following(state, character)
            if not state.nodes:
                return found
            if state.accepts:
                found |= state.accepts
        return found | state.accepts_at_end
