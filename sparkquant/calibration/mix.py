"""A mix: named sources of calibration data with shares and filters. Written by people, so strict like a recipe."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from sparkquant.calibration.conversation import canonical
from sparkquant.errors import CalibrationError, Problem
from sparkquant.positions import Document

HINT = "calibration/README.md shows every key; the shipped mixes are working examples"
"""The next step after any fault in a mix."""

KINDS = ("conversations", "text", "table", "hub")
MAX_ROWS, MAX_TOKENS = 100_000, 1_048_576


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_many)]
Tokens = Annotated[int, Field(ge=16, le=MAX_TOKENS)]
Rows = Annotated[int, Field(ge=1, le=MAX_ROWS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,79}$")]


class Filters(_Strict):
    """What of a source is taken. `tags`: any of them; the token limits hold for the whole rendered conversation."""

    tags: Texts = ()
    without_tags: Texts = ()
    languages: Texts = ()
    thinking: bool | None = None
    tools: bool | None = None
    min_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None


class Wrap(_Strict):
    """How a text is told as a conversation; `{text}` stands for the text, `{path}` for its file."""

    user: Text
    assistant: Text


class Columns(_Strict):
    """Which column of a table holds what: `messages` (with `tools`), `conversations` (ShareGPT), `text`, or
    `user` and `assistant` (one exchange of plain text)."""

    messages: Text | None = None
    tools: Text | None = None
    conversations: Text | None = None
    text: Text | None = None
    user: Text | None = None
    assistant: Text | None = None
    language: Text | None = None


class Source(_Strict):
    """One source: exactly one of `conversations`, `text`, `table` (paths or globs beside the mix) and `hub` (an id)."""

    conversations: Texts = ()
    text: Texts = ()
    table: Texts = ()
    hub: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    share: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    filters: Filters = Filters()
    exclude: Texts = ()
    wrap: Wrap | None = None
    columns: Columns | None = None
    config: Text | None = None
    split: Text = "train"
    revision: Text | None = None
    limit: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000

    @property
    def kind(self) -> str:
        """Which of the four it is."""
        return next(kind for kind in KINDS if getattr(self, kind))


class Mix(_Strict):
    """A validated mix. `folder` is where its relative paths start; `source` names the file it came from."""

    name: Name
    summary: Annotated[str, Field(min_length=8)]
    rows: Rows = 256
    tokens: Tokens = 2048
    seed: Seed = 0
    sources: Annotated[dict[Name, Source], Field(min_length=1)]
    source: Annotated[str, Field(exclude=True)] = ""
    folder: Annotated[Path, Field(exclude=True)] = Path()

    @property
    def digest(self) -> str:
        """sha256 over what the mix says, wherever it lies."""
        return hashlib.sha256(canonical(self.model_dump(mode="json"))).hexdigest()


ONLY_FOR = {
    "exclude": ("text", "conversations"), "wrap": ("text",), "columns": ("table", "hub"), "config": ("hub",),
    "split": ("hub",), "revision": ("hub",), "limit": ("table", "hub"),
}  # fmt: skip
"""Keys that mean something for some kinds of source only."""


def _known_keys(path: tuple[Any, ...]) -> list[str]:
    if not path:
        return [name for name in Mix.model_fields if name not in ("source", "folder")]
    models: dict[str, type[BaseModel]] = {"filters": Filters, "wrap": Wrap, "columns": Columns}
    model = Source if len(path) == 2 else models.get(str(path[-1]))
    return list(model.model_fields) if model else []


def _unknown_key(path: tuple[Any, ...], document: Document) -> Problem:
    known = _known_keys(path[:-1])
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return Problem(document.place(path, key=True), f"unknown key {'.'.join(map(str, path))!r}", hint)


def _problem(error: ErrorDetails, document: Document) -> Problem:
    path = tuple(part for part in error["loc"] if part != "[key]")
    dotted = ".".join(map(str, path))
    if error["type"] == "extra_forbidden":
        return _unknown_key(path, document)
    if error["type"] == "missing":
        return Problem(document.place(path), f"{dotted!r} is missing")
    return Problem(document.place(path, key=error["loc"][-1:] == ("[key]",)), f"{dotted}: {error['msg']}")


def _source_faults(name: str, fields: Mapping[str, Any], document: Document) -> Iterator[Problem]:
    """Keys of one source that do not belong together; works on raw data, so that all faults show in one run."""
    at = ("sources", name)
    kinds = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        found = f"found {' and '.join(kinds)}" if kinds else "found none"
        yield Problem(document.place(at, key=True), f"source {name!r} needs exactly one of {', '.join(KINDS)}", found)
        return
    kind = kinds[0]
    if fields[kind] in ("", [], None):
        yield Problem(document.place((*at, kind)), f"sources.{name}.{kind} is empty")
    for key, allowed in ONLY_FOR.items():
        if key in fields and kind not in allowed:
            where = document.place((*at, key), key=True)
            yield Problem(where, f"{key!r} means nothing for a source of {kind}", "remove the line")
    yield from _columns_faults(kind, fields, document, at)
    wrap = fields.get("wrap")
    if isinstance(wrap, Mapping) and "{text}" not in f"{wrap.get('user')}{wrap.get('assistant')}":
        where = document.place((*at, "wrap"))
        yield Problem(where, "neither user nor assistant holds {text}", "the text would be left out")
    filters = fields.get("filters")
    if isinstance(filters, Mapping):
        if kind == "text":
            for key in sorted({"tags", "without_tags", "languages", "thinking", "tools"}.intersection(filters)):
                where = document.place((*at, "filters", key), key=True)
                yield Problem(where, f"plain texts have no {key}", "remove the line")
        low, high = filters.get("min_tokens"), filters.get("max_tokens")
        if isinstance(low, int) and isinstance(high, int) and low > high:
            where = document.place((*at, "filters", "min_tokens"), key=True)
            yield Problem(where, f"min_tokens {low} is above max_tokens {high}", "no row would remain")


def _columns_faults(kind: str, fields: Mapping[str, Any], document: Document, at: tuple[str, ...]) -> Iterator[Problem]:
    columns = fields.get("columns")
    if columns is None and kind in ("table", "hub"):
        where = document.place((*at, kind), key=True)
        yield Problem(where, f"source {at[1]!r} does not say what its columns hold", "add columns: {messages: NAME}")
    if not isinstance(columns, Mapping):
        return
    where = document.place((*at, "columns"))
    forms = [form for form in ("messages", "conversations", "text") if columns.get(form)]
    if columns.get("user") or columns.get("assistant"):
        forms.append("user and assistant")
        if not (columns.get("user") and columns.get("assistant")):
            yield Problem(where, "user and assistant go together", "name both columns")
    if len(forms) != 1:
        found = f"found {', '.join(forms)}" if forms else "found none"
        yield Problem(where, "columns need one of messages, conversations, text, or user with assistant", found)


def parse_mix(fields: Any, *, source: str, folder: Path, document: Document | None = None) -> Mix:
    """Validate plain data; CalibrationError with every fault at once."""
    document = document or Document("", source)
    if not isinstance(fields, Mapping):
        raise CalibrationError(f"{source}: a mix is a map of keys, found {type(fields).__name__}", hint=HINT)
    problems = [*document.duplicates, *document.odd_keys]
    problems += (_unknown_key((key,), document) for key in ("source", "folder") if key in fields)
    mix: Mix | None = None
    try:
        mix = Mix.model_validate({**fields, "source": source, "folder": folder})
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems += (_problem(d, document) for d in details if d["type"] != "invalid_key" or not document.odd_keys)
    sources = fields.get("sources")
    if isinstance(sources, Mapping):
        for name, declared in sources.items():
            if isinstance(name, str) and isinstance(declared, Mapping):
                problems += _source_faults(name, declared, document)
    if problems or mix is None:
        count = f"{len(problems)} fault{'s' * (len(problems) > 1)}"
        raise CalibrationError(f"{source}: {count}", hint=HINT, problems=problems)
    return mix
