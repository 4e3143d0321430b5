"""The model card: README.md of a result, written from its plan, its config and its fresh evidence alone.

A number that no fresh record holds is not in the card; what was not measured is named instead. Text between the two
marks at its end belongs to the publisher and is kept when the card is written again.
"""

from __future__ import annotations

import importlib.resources
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkquant.card_metadata import card_metadata, card_of, front_matter, result_metadata
from sparkquant.card_runs import bench_run, validate_run
from sparkquant.checkpoint import read_json
from sparkquant.errors import CheckpointError
from sparkquant.evidence import CARD, Evidence, content_files
from sparkquant.layers import ENGINES
from sparkquant.serve_command import serve_command

if TYPE_CHECKING:
    import jinja2

MARK = "<!-- model card of sparkquant: written again by `sparkquant publish` -->"
NOTES_BEGIN = "<!-- your own words begin here and are kept -->"
NOTES_END = "<!-- your own words end here -->"
SOURCE_CARD = f"SOURCE_{CARD}"
MAX_TEXT = 2000


class Standing(StrEnum):
    """How far a checkpoint has come: what fresh, passed evidence there is."""

    CANDIDATE = "candidate"
    VERIFIED = "verified"
    VALIDATED = "validated"


MEANING = {
    Standing.CANDIDATE: "Static checks and measured quality have not both passed for exactly these files",
    Standing.VERIFIED: "The static checks passed, and the measured quality is within the limits of the recipe",
    Standing.VALIDATED: "Static checks, measured quality and a run on the engine passed",
}
LADDER = {Standing.VALIDATED: ("verify", "evaluate", "validate"), Standing.VERIFIED: ("verify", "evaluate")}
MEASURING = ("verify", "evaluate", "validate", "bench")


def standing_of(evidence: Mapping[str, Evidence]) -> Standing:
    """The highest rung all of whose verbs are green."""
    green = {verb for verb, found in evidence.items() if found.green}
    return next((rung for rung, verbs in LADDER.items() if green.issuperset(verbs)), Standing.CANDIDATE)


@dataclass(frozen=True)
class CardPlace:
    """Where the card will be read: hub id of the result (empty: a folder) and hub id of the source (empty: unknown)."""

    repository: str = ""
    base_model: str = ""


def card_text(folder: Path, evidence: Mapping[str, Evidence], digest: str, place: CardPlace | None = None) -> str:
    """The whole card of a result of `quantize`; stable: the same folder and evidence give the same text.

    Raises CheckpointError when the folder has no readable plan, recipe or config.
    """
    place = place or CardPlace()
    plan, config = _plan_of(folder), read_json(folder / "config.json")
    fresh = {verb: found for verb, found in evidence.items() if not found.why}
    standing = standing_of(evidence)
    base_model, revision = base_model_of(folder, fresh, place.base_model)
    kept = [row for row in plan["classes"] if row["scheme"] == "keep"]
    metadata = result_metadata(
        card_metadata(folder / SOURCE_CARD),
        base_model=base_model,
        schemes=[row["scheme"] for row in plan["classes"] if row["scheme"] != "keep"],
        status=standing,
        quant_method=str(config.get("quantization_config", {}).get("quant_method", "")),
    )
    files = content_files(folder)
    engines = list(plan.get("engines", ()))
    return _render(
        metadata=front_matter(metadata).rstrip("\n"),
        mark=MARK,
        title=place.repository.rpartition("/")[2] or plan["recipe"]["name"],
        recipe=plan["recipe"],
        base_model=base_model,
        revision=revision,
        versions=fresh["quantize"].record["versions"] if "quantize" in fresh else {"sparkquant": "of another build"},
        status=standing,
        meaning=_meaning(standing, evidence),
        totals=plan["totals"],
        files=len(files),
        files_bytes=sum(status.st_size for status in files.values()),
        shards=sum(name.endswith(".safetensors") for name in files),
        digest=digest,
        plan_digest=plan_digest(folder),
        command=serve_command(shlex.quote(place.repository or "."), config, plan["totals"]),
        engines=engines,
        not_loading=[version for version in ENGINES if version not in engines],
        known_bad=list(_known_bad(plan, engines)),
        kept=kept,
        classes=plan["classes"],
        evaluated=fresh["evaluate"].record if "evaluate" in fresh else {},
        evaluate=_evaluation(fresh),
        positions=_positions(fresh),
        runs=[*validate_run(fresh.get("validate")), *bench_run(fresh.get("bench"))],
        made=list(_made(folder, plan, fresh)),
        recipe_block=_fenced(_text(folder / "sparkquant" / "recipe.yaml"), "yaml"),
        notes_begin=NOTES_BEGIN,
        notes_end=NOTES_END,
        own_notes=_own_notes(folder),
    )


def is_ours(folder: Path) -> bool:
    """Whether README.md is a card that this module wrote, or absent."""
    text = card_of(folder / CARD)
    return MARK in text or not (folder / CARD).exists()


def plan_digest(folder: Path) -> str:
    """sha256 of plan.json as it lies in the folder: the identity of the job, and the tag of its publication."""
    import hashlib

    return hashlib.sha256(_text(folder / "sparkquant" / "plan.json").encode()).hexdigest()


def base_model_of(folder: Path, evidence: Mapping[str, Evidence], given: str = "") -> tuple[str, str]:
    """Hub id and revision of the source: as given, as `quantize` recorded them, or as the card here states them."""
    inputs = evidence["quantize"].record.get("inputs", {}) if "quantize" in evidence else {}
    recorded = inputs.get("source", "")
    if not given and isinstance(recorded, str) and recorded.count("/") == 1:
        return recorded, str(inputs.get("revision", ""))
    if not given and MARK in card_of(folder / CARD):
        stated = card_metadata(folder / CARD).get("base_model")
        given = stated[0] if isinstance(stated, list) and stated and isinstance(stated[0], str) else ""
    return given, ""


def _plan_of(folder: Path) -> dict[str, Any]:
    plan = read_json(folder / "sparkquant" / "plan.json")
    missing = [key for key in ("recipe", "totals", "classes") if key not in plan]
    if missing:
        raise CheckpointError(
            f"{folder / 'sparkquant' / 'plan.json'}: no {', '.join(missing)}",
            hint="restore the plan that the result was made with",
        )
    return plan


def _meaning(standing: Standing, evidence: Mapping[str, Evidence]) -> str:
    told = [f"{MEANING[standing]}."]
    for verb in MEASURING:
        found = evidence.get(verb)
        if found is None:
            told.append(f"No `{verb}` was recorded.")
        elif found.why:
            told.append(f"The record of `{verb}` is {found.freshness}: {found.why}.")
        elif not found.green:
            told.append(f"`{verb}`: {found.outcome}.")
    return " ".join(told)


def _evaluation(fresh: Mapping[str, Evidence]) -> dict[str, Any] | None:
    return dict(fresh["evaluate"].result) if "evaluate" in fresh else None


def _positions(fresh: Mapping[str, Evidence]) -> int:
    found = _evaluation(fresh) or {}
    return max((len(rates) for sides in found.get("acceptance", {}).values() for rates in sides.values()), default=0)


def _known_bad(plan: Mapping[str, Any], engines: Sequence[str]) -> Iterator[dict[str, str]]:
    """Rows of the known-bad table that speak of this plan's schemes on its target, in versions that load the result."""
    from sparkquant.marlin.known_bad import known_bad

    capability = (plan["recipe"].get("target") or {}).get("capability")
    used = {(_kind(row["scheme"]), row["class"].startswith("experts.")) for row in plan["classes"]}
    rows = {row.id: row for version in engines for row in known_bad(capability, version)} if capability else {}
    for row in rows.values():
        if any(row.scheme in ("", kind) and row.experts in (None, experts) for kind, experts in used if kind):
            versions = f"vLLM {row.since or 'any'} to {row.until}" if row.until else f"vLLM from {row.since or 'any'}"
            yield {
                "where": f"{capability}, {versions}; {row.status}",
                "what": row.what,
                "do": row.do,
                "source": row.source,
            }


def _kind(scheme: str) -> str:
    """A scheme as the table names it; empty for what is kept."""
    return next(
        (kind for kind, start in (("int", "w"), ("nvfp4", "nvfp4"), ("fp8", "fp8")) if scheme.startswith(start)), ""
    )


def _made(folder: Path, plan: Mapping[str, Any], fresh: Mapping[str, Evidence]) -> Iterator[str]:
    method = plan["recipe"].get("method", {})
    options = ", ".join(f"{key} {value}" for key, value in method.items() if key != "name")
    yield f"Method `{method.get('name')}`" + (f" ({options})." if options else ".")
    backend = fresh["quantize"].result.get("backend") if "quantize" in fresh else None
    if isinstance(backend, Mapping):
        yield f"Backend: {backend.get('name')} {backend.get('version')}."
    path = folder / "sparkquant" / "calibration.json"
    if path.is_file():
        yield from _calibration(read_json(path).get("calibration", {}))
    else:
        yield "No calibration data: every scale comes from the weights alone."
    yield f"Source headers: sha256 `{plan.get('source', {}).get('headers', '')}`."
    for verb in ("quantize", "verify"):
        if verb in fresh:
            record = fresh[verb].record
            told = ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items()))
            yield f"`{verb}`: {_checked(record)}{told}."
    yield from (str(note) for note in plan.get("notes", ()))


def _checked(record: Mapping[str, Any]) -> str:
    checks = record["result"].get("checks", ())
    passed = sum(check["status"] == "pass" for check in checks)
    level = record["inputs"].get("level")
    against = " against the source" if record["inputs"].get("source") else ""
    return f"{passed} checks passed at level {level}{against}; " if checks else ""


def _calibration(made: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Calibration: {made.get('name')}, {made.get('rows'):,} rows, {made.get('tokens'):,} tokens,"
        f" digest `{made.get('digest')}`."
    )
    for name, count in made.get("sources", {}).items():
        told = ", ".join(f"{key} {value:,}" for key, value in count.items() if isinstance(value, int))
        yield f"Calibration source {name}: {told}."
    for name, digest in made.get("made", {}).items():
        if digest:
            yield f"Calibration {name}: `{digest}`."


def _own_notes(folder: Path) -> str:
    found = re.search(f"{re.escape(NOTES_BEGIN)}\n(.*?)\n?{re.escape(NOTES_END)}", card_of(folder / CARD), re.DOTALL)
    return found[1].strip("\n") if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}", hint="restore the file that the result was made with") from None


def _fenced(text: str, language: str) -> str:
    """A code block that its content cannot end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def markdown(value: object) -> str:
    """Foreign text inside a sentence or a table cell: one line, no HTML, no cell or link of its own."""
    text = " ".join(str(value).split())[:MAX_TEXT]
    return re.sub(r"([|\[\]<>])", lambda match: f"&#{ord(match[1])};", text)


def sized(count: float) -> str:
    """Bytes with a binary unit: `18.12 GiB`."""
    units: Sequence[str] = ("B", "KiB", "MiB", "GiB")
    power = next((n for n in range(3) if count < 1024 ** (n + 1)), 3)
    return f"{count:.0f} B" if power == 0 else f"{count / 1024**power:,.2f} {units[power]}"


def _render(**fields: Any) -> str:
    import jinja2

    try:
        return _template().render(**fields)
    except (jinja2.UndefinedError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"the evidence does not hold what the card states: {error}", hint="run the verbs again with this version"
        ) from None


@cache
def _template() -> jinja2.Template:
    import jinja2

    text = importlib.resources.files("sparkquant").joinpath("card.md.jinja").read_text(encoding="utf-8")
    made = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    made.filters |= {"md": markdown, "size": sized}
    return made.from_string(text)
