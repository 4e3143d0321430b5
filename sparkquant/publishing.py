"""`sparkquant.publish`: what goes to the hub, what keeps it from going, and the way there.

    check again -> evidence -> card -> upload file by file -> one commit -> look at what is there -> tag

The commit is the only step that others see: whatever fails before it leaves the branch as it was, and the next run does
not send again what has arrived. The revision holds the checkpoint, its card and its fresh evidence, and nothing else.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkquant.card import CardPlace, Standing, base_model_of, card_text, is_ours, plan_digest, standing_of
from sparkquant.errors import CheckFailed, CheckpointError, Problem, UsageError
from sparkquant.events import Advanced, Finished, Listener, Said, Started, ignore
from sparkquant.evidence import CARD, FOLDER, PLAN, Evidence, checkpoint_digest, content_files, read, state_of
from sparkquant.evidence import Freshness as Fresh
from sparkquant.hub import Hub, RemoteFile, changed_names, require_names
from sparkquant.report import Report, Status
from sparkquant.source import local_path

REQUIRED = ("quantize", "verify", "evaluate", "validate")
VERBS = (*REQUIRED, "bench")
COMMANDS = {
    "quantize": "sparkquant quantize SRC -r RECIPE -o NEW",
    "verify": "sparkquant verify {out} --source SRC",
    "evaluate": "sparkquant evaluate {out} --source SRC",
    "validate": "sparkquant validate {out}",
    "bench": "sparkquant bench {out}",
}

ALONE_BYTES = 2**20
"""Files from this size on are sent one by one before the commit, which carries the small ones."""


@dataclass(frozen=True)
class Publication:
    """What was published, or would be.

    revision  the commit that the tag names; empty after a dry run
    tag       digest of the plan
    files     bytes of every file of the revision
    removed   files that the branch held before and that are not part of the checkpoint
    """

    repository: str
    branch: str
    tag: str
    standing: Standing
    base_model: str
    files: Mapping[str, int]
    revision: str = ""
    url: str = ""
    removed: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(self.files.values())

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "repository": self.repository,
            "branch": self.branch,
            "tag": self.tag,
            "status": str(self.standing),
            "base_model": self.base_model,
            "revision": self.revision,
            "url": self.url,
            "bytes": self.bytes,
            "files": dict(self.files),
            "removed": list(self.removed),
        }


def publish(
    out: str | os.PathLike[str],
    repository: str,
    *,
    dry_run: bool = False,
    private: bool = False,
    branch: str | None = None,
    allow_missing: Sequence[str] = (),
    base_model: str = "",
    listener: Listener = ignore,
) -> Publication:
    """Upload a result of `quantize` with its card and evidence, and tag the revision with the digest of its plan.

    dry_run        check, write the card, and stop: neither network nor token is needed
    allow_missing  verbs whose evidence may be missing, stale or inconclusive; what failed is never published
    base_model     hub id of the source, where `quantize` took a folder and could not know it

    Raises CheckFailed, with everything that is missing and the command that makes it, before anything is sent;
    EnvironmentMissing without a token that may write; Resumable when the hub fails half-way.
    """
    folder = local_path(out)
    require_names(repository, branch)
    if base_model:
        require_names(base_model, None)
    _require_verbs(allow_missing)
    if not (folder / PLAN).is_file():
        raise CheckpointError(f"{folder} is no result of sparkquant", hint="publish what `sparkquant quantize` made")
    hub = None if dry_run else Hub(repository, branch)
    seen = state_of(folder)
    digest = checkpoint_digest(folder, listener=listener)
    evidence = read(folder, digest=digest)
    report = _checked(folder, values=not dry_run, listener=listener)
    _write_card(folder, card_text(folder, evidence, digest, CardPlace(repository, base_model)))
    problems = [*_failed(report), *_lacking(evidence, allow_missing, folder)]
    if problems:
        raise CheckFailed(
            f"{folder} is not fit to be published, and nothing was sent",
            hint="run what is missing; --allow-missing VERB publishes without a verb, never against it",
            problems=problems,
        )
    known, _ = base_model_of(folder, evidence, base_model)
    if not known:
        listener(Said("the card names no base model: quantize took a folder; pass --base-model owner/name"))
    tag, standing = plan_digest(folder), standing_of(evidence)
    files = {name: (folder / name).stat().st_size for name in _published(folder, evidence)}
    found = Publication(repository, branch or "main", tag, standing, known, files)
    return found if hub is None else _sent(hub, folder, found, seen, private=private, listener=listener)


def _require_verbs(verbs: Sequence[str]) -> None:
    for verb in verbs:
        if verb not in VERBS:
            near = difflib.get_close_matches(verb, VERBS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(VERBS)}"
            raise UsageError(f"no evidence is called {verb!r}", hint=hint)


def _checked(folder: Path, *, values: bool, listener: Listener) -> Report:
    """The folder checked again. A dry run reads headers alone: fresh evidence speaks for the bytes that it names."""
    from sparkquant.verification.gate import verify

    return verify(folder, level="default" if values else "headers", listener=listener)


def _failed(report: Report) -> Iterator[Problem]:
    for check in report.failed:
        yield Problem(check.id, check.message)


def _lacking(evidence: Mapping[str, Evidence], allowed: Sequence[str], folder: Path) -> Iterator[Problem]:
    for verb in dict.fromkeys((*REQUIRED, *evidence)):
        found = evidence.get(verb)
        hint = f"run `{COMMANDS[verb].format(out=folder)}`" if verb in COMMANDS else f"remove {FOLDER}/{verb}.json"
        if found is not None and found.freshness is Fresh.FRESH and found.outcome is Status.FAIL:
            yield Problem(verb, "failed", hint)
        elif verb in allowed or (found is not None and found.green):
            continue
        elif found is None:
            yield Problem(verb, "no evidence", hint)
        elif found.freshness is Fresh.FRESH:
            yield Problem(verb, f"{found.outcome}", hint)
        else:
            yield Problem(verb, f"its evidence is {found.freshness}: {found.why}", hint)


def _write_card(folder: Path, text: str) -> None:
    path = folder / CARD
    if not is_ours(folder):
        raise UsageError(
            f"{path} was not written by sparkquant, and would be lost",
            hint="move it away, run this again, and put your words between the two marks at the end of the new card",
        )
    if path.is_symlink():
        raise UsageError(f"{path} is a link", hint="remove the link")
    try:
        part = path.with_name(f".{CARD}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", hint="make the folder writable") from None


def _published(folder: Path, evidence: Mapping[str, Evidence]) -> list[str]:
    records = [f"{FOLDER}/{verb}.json" for verb, found in evidence.items() if found.freshness is Fresh.FRESH]
    return [*content_files(folder), *records, CARD]


def _sent(
    hub: Hub,
    folder: Path,
    found: Publication,
    seen: Mapping[str, tuple[int, int]],
    *,
    private: bool,
    listener: Listener,
) -> Publication:
    parent = hub.open(private=private)
    additions = {name: hub.addition(name, folder / name) for name in found.files}
    _require_free(hub, folder, found)
    before = hub.tree(parent)
    listener(Started("upload", found.bytes))
    for name, addition in additions.items():
        if found.files[name] >= ALONE_BYTES or name.endswith(".safetensors"):
            hub.send(addition)
        listener(Advanced("upload", found.files[name], name))
    _require_unchanged(folder, seen)
    gone = changed_names(found.files, before)
    message = f"Checkpoint of plan {found.tag[:12]}, {found.standing}"
    revision = hub.commit(list(additions.values()), gone, message, parent)
    there = hub.tree(revision)
    wrong = [name for name, addition in additions.items() if not _arrived(there.get(name), folder / name, addition)]
    wrong += changed_names(found.files, there)
    if wrong:
        raise CheckFailed(
            f"{hub.url} at {revision[:12]} is not what was sent, and was not tagged",
            hint="run the same command again",
            problems=[Problem(name, "differs from the folder") for name in wrong],
        )
    _require_unchanged(folder, seen)
    hub.tag(found.tag, revision)
    listener(Finished("upload"))
    return Publication(**{**found.__dict__, "revision": revision, "url": hub.url, "removed": tuple(gone)})


def _require_unchanged(folder: Path, seen: Mapping[str, tuple[int, int]]) -> None:
    if state_of(folder) != dict(seen):
        raise CheckpointError(f"{folder} was changed while it was sent", hint="run the verbs and this command again")


def _arrived(remote: RemoteFile | None, path: Path, addition: Any) -> bool:
    return remote is not None and remote.holds(path, addition)


def _require_free(hub: Hub, folder: Path, found: Publication) -> None:
    """A tag that names other weights of the same plan stays where it is."""
    tagged = hub.tags().get(found.tag)
    if tagged is None:
        return
    there = hub.tree(tagged)
    content = content_files(folder)
    unlike = [name for name in content if name not in there or not there[name].holds(folder / name)]
    unlike += [name for name in changed_names(found.files, there) if not name.startswith(f"{FOLDER}/")]
    if unlike:
        raise UsageError(
            f"{hub.url}: the tag of this plan names another checkpoint (it differs in {unlike[0]})",
            hint=f"publish elsewhere, or remove the tag: hf repos tag delete {found.repository} {found.tag}",
        )
