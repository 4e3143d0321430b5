"""Where things stand in a YAML file: line and column of every key and value, so that a fault can be pointed at."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from sparkquant.errors import Problem, RecipeError


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases and tags: a few aliases can stand for a billion values, a tag for a surprising type."""

    def __init__(self, text: str) -> None:
        self.unreadable: list[tuple[yaml.ScalarNode, str]] = []
        super().__init__(text)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise MarkedYAMLError(problem="aliases are refused: write the value out", problem_mark=mark)
        if getattr(event, "tag", None) is not None:
            raise MarkedYAMLError(problem=f"tag {event.tag!r} is refused", problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A value that looks like a date or a number and is none stays text, and is a fault with a place."""
        try:
            value = super().construct_object(node, deep)
            if type(value) is int and value.bit_length() > 64:
                raise ValueError("too large")
            return value
        except (ValueError, OverflowError) as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            self.unreadable.append((node, str(error)))
            return node.value[:40]


class Document:
    """A YAML text with the position of every key and value, so that a fault can be pointed at.

    Without a text (plain data) faults are placed by the path of their key.
    """

    def __init__(self, text: str | None, source: str) -> None:
        self.source = source
        self.plain = text is None
        self.marks: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.duplicates: list[Problem] = []
        self.odd_keys: list[Problem] = []
        self.unreadable: list[Problem] = []
        self.value: Any = None
        if text is None:
            return
        try:
            loader = _PlainLoader(text)
            root = loader.get_single_node()
            if root is not None:
                self._visit(root, ())
                self.value = loader.construct_document(root)
            self.unreadable = [self._unreadable(node, why) for node, why in loader.unreadable]
        except ReaderError as error:
            before = text[: error.position]
            at = f"{source}:{before.count(chr(10)) + 1}:{error.position - before.rfind(chr(10))}"
            code = error.character if isinstance(error.character, int) else ord(error.character[:1])
            what = f"the character U+{code:04X} is not allowed: special characters are not allowed in YAML"
            raise RecipeError(
                f"{source} is not valid YAML", hint="remove the character", problems=[Problem(at, what)]
            ) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
            what = getattr(error, "problem", None) or str(error).partition("\n")[0]
            raise RecipeError(
                f"{source} is not valid YAML", hint="fix the line", problems=[Problem(f"{source}{at}", str(what))]
            ) from None
        except (RecursionError, ValueError) as error:
            raise RecipeError(f"{source} cannot be read: {error}", hint="a recipe is a short, plain map") from None

    def _unreadable(self, node: yaml.ScalarNode, why: str) -> Problem:
        mark: Any = node.start_mark
        short = node.value if len(node.value) <= 40 else f"{node.value[:30]}..."
        kind = {"timestamp": "date", "int": "number", "float": "number"}.get(node.tag.rpartition(":")[2], "value")
        why = f"{len(node.value)} characters" if len(node.value) > 40 else why
        return Problem(
            f"{self.source}:{mark.line + 1}:{mark.column + 1}",
            f"{short!r} is no {kind}: {why}",
            "quote it if it is text",
        )

    def _visit(self, node: yaml.Node, path: tuple[Any, ...], depth: int = 0) -> None:
        self.marks.setdefault(path, (node.start_mark.line + 1, node.start_mark.column + 1))
        if depth > 20:
            raise RecipeError(f"{self.source}: nested too deeply", hint="a recipe is a short, plain map")
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    mark: Any = key.start_mark
                    raise MarkedYAMLError(problem="a key must be text", problem_mark=mark)
                self.marks[(*path, key.value, "<key>")] = (key.start_mark.line + 1, key.start_mark.column + 1)
                if key.tag != "tag:yaml.org,2002:str":
                    self.odd_keys.append(
                        Problem(self.place((*path, key.value, "<key>")), f"key {key.value!r} is not text", "quote it")
                    )
                if key.value in seen:
                    self.duplicates.append(Problem(self.place((*path, key.value, "<key>")), f"{key.value!r} twice"))
                seen.add(key.value)
                self._visit(value, (*path, key.value), depth + 1)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._visit(value, (*path, index), depth + 1)

    def place(self, path: tuple[Any, ...], *, key: bool = False) -> str:
        """`file:line:col` of a value (or of its key), or of the nearest parent that exists; of plain data the path."""
        if self.plain:
            keys = ".".join(str(part) for part in path if part != "<key>")
            return f"{self.source}: {keys}" if keys else self.source
        if key and (*path, "<key>") in self.marks:
            path = (*path, "<key>")
        while path and path not in self.marks:
            path = path[:-1]
        line, column = self.marks.get(path, (1, 1))
        return f"{self.source}:{line}:{column}"
