"""Everything that a report says of one checkpoint: its contents, its plan, and what its evidence shows."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sparkquant.checkpoint import read_json
from sparkquant.contents import Contents, contents_of
from sparkquant.errors import CheckpointError, UnsupportedFormat, UsageError
from sparkquant.events import Listener, ignore
from sparkquant.evidence import PLAN, Evidence, Freshness, checkpoint_digest, read
from sparkquant.measured import Controls, Measured, Quality, Throughput, parsed
from sparkquant.printable import clean
from sparkquant.report import Status
from sparkquant.source import local_path
from sparkquant.verification.subject import Subject, open_checkpoint, readable

VERBS = ("quantize", "verify", "evaluate", "validate", "bench")
"""Verbs whose records a report shows, in the order in which they are run."""

NEXT = {
    "quantize": "sparkquant quantize SRC -r RECIPE -o {name}",
    "verify": "sparkquant verify {name} --source SRC --deep",
    "evaluate": "sparkquant evaluate {name} --source SRC",
    "validate": "sparkquant validate {name} --reference SRC",
    "bench": "sparkquant bench {name}",
}


Record = TypeVar("Record", bound=Measured)


@dataclass(frozen=True)
class Row:
    """A line of the evidence table: `state` is pass, fail, inconclusive, stale, unreadable or missing."""

    verb: str
    state: str
    date: str = ""
    why: str = ""
    next: str = ""


@dataclass(frozen=True)
class Sheet:
    """One checkpoint.

    name       short and unique in its report
    contents   None when the quantization is of an unknown kind; `problems` says so
    recipe     name, summary and method of the recipe that it was made with; empty for other producers
    notes      of its plan
    quality, controls, throughput  what fresh evidence shows; None where there is none
    problems   what could not be read
    """

    name: str
    digest: str
    model_type: str
    contents: Contents | None
    evidence: Mapping[str, Evidence]
    recipe: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    quality: Quality | None = None
    controls: Controls | None = None
    throughput: Throughput | None = None
    problems: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """One line for each verb, present or not."""
        return tuple(self._row(verb) for verb in VERBS)

    def command(self, verb: str) -> str:
        """What measures it: a line for a shell."""
        return NEXT[verb].format(name=shlex.quote(self.name))

    def _row(self, verb: str) -> Row:
        following = self.command(verb)
        found = self.evidence.get(verb)
        if found is None:
            return Row(verb, "missing", next=following)
        date = clean(str(found.record.get("date", ""))[:20])
        if found.freshness is not Freshness.FRESH:
            return Row(verb, str(found.freshness), date, clean(found.why), following)
        return Row(verb, str(found.outcome), date, _failed(found.result))

    def as_json(self) -> dict[str, Any]:
        """Plain JSON: the contents, and each record as it lies in the checkpoint, with its freshness."""
        return {
            "name": self.name,
            "digest": self.digest,
            "model_type": self.model_type,
            "recipe": dict(self.recipe),
            "contents": None if self.contents is None else self.contents.as_json(),
            "notes": list(self.notes),
            "problems": list(self.problems),
            "evidence": {
                verb: {"freshness": str(found.freshness), "why": found.why, "record": dict(found.record)}
                for verb, found in self.evidence.items()
            },
            "missing": [row.verb for row in self.rows if row.state == "missing"],
        }


def sheets_of(folders: Sequence[str | os.PathLike[str]], *, listener: Listener = ignore) -> tuple[Sheet, ...]:
    """A sheet for each folder. Raises UsageError for one that is named twice, CheckpointError for what is none."""
    paths = [local_path(folder) for folder in folders]
    real = [path.resolve() for path in paths]
    for number, path in enumerate(real):
        if path in real[:number]:
            raise UsageError(f"{paths[number]} is named twice", hint="name different checkpoints")
    names = _names(real)
    return tuple(_sheet(path, name, listener) for path, name in zip(paths, names, strict=True))


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, and as many parts before it as it takes to tell them apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return [clean(name) for name in names]


def _sheet(path: Path, name: str, listener: Listener) -> Sheet:
    checkpoint = open_checkpoint(path)
    problems: list[str] = []
    contents = None
    try:
        contents = contents_of(Subject(checkpoint, None))
    except UnsupportedFormat as error:
        problems.append(clean(error.what))
    digest = checkpoint_digest(path, listener=listener)
    evidence = read(path, digest=digest)
    recipe, notes = _planned(path, problems)
    quality = _measured(Quality, "evaluate", evidence, problems)
    return Sheet(
        name=name, digest=digest, model_type=clean(checkpoint.config.get("model_type")), contents=contents,
        evidence=evidence, recipe=recipe, notes=notes, quality=quality,
        controls=_measured(Controls, "validate", evidence, problems),
        throughput=_measured(Throughput, "bench", evidence, problems), problems=tuple(problems),
    )  # fmt: skip


def _failed(result: Mapping[str, Any]) -> str:
    """What a record says of its red checks; an evaluation that failed needs no second run but a reader."""
    checks = result.get("checks")
    told = [
        clean(check.get("message", check.get("id", "")))
        for check in (checks if isinstance(checks, list) else ())
        if isinstance(check, Mapping) and check.get("status") in (Status.FAIL, Status.INCONCLUSIVE)
    ]
    return "; ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")


def _measured(kind: type[Record], verb: str, evidence: Mapping[str, Evidence], problems: list[str]) -> Record | None:
    """The result of a verb, if its record is fresh and whole: numbers of another checkpoint are never shown."""
    found = evidence.get(verb)
    if found is None or found.freshness is not Freshness.FRESH:
        return None
    result, fault = parsed(kind, found.result)
    if fault:
        problems.append(clean(f"the record of {verb} cannot be shown: {fault}"))
    return result


def _planned(path: Path, problems: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(recipe, notes) of the plan in a result; empty without one."""
    if not readable(path / PLAN, path):
        return {}, ()
    try:
        plan = read_json(path / PLAN)
    except CheckpointError as error:
        problems.append(clean(error.what))
        return {}, ()
    recipe, notes = plan.get("recipe"), plan.get("notes")
    told = {}
    if isinstance(recipe, Mapping):
        method = recipe.get("method")
        told = {key: clean(recipe[key]) for key in ("name", "summary") if isinstance(recipe.get(key), str)}
        if isinstance(method, Mapping) and isinstance(method.get("name"), str):
            told["method"] = clean(method["name"])
    return told, tuple(clean(note) for note in notes if isinstance(note, str)) if isinstance(notes, list) else ()


def to_json(sheets: Sequence[Sheet]) -> str:
    """All of it as one stable document."""
    from sparkquant import version

    document = {"report": f"sparkquant {version()}", "checkpoints": [sheet.as_json() for sheet in sheets]}
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
