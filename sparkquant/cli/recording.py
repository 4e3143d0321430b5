"""Verbs that measure keep what they found in the checkpoint, as evidence for the card and for `publish`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkquant.cli.progress import progress
from sparkquant.cli.shell import clean, console
from sparkquant.errors import SparkquantError

if TYPE_CHECKING:
    from sparkquant.evidence import Evidence

NoEvidenceOption = Annotated[
    bool, typer.Option("--no-evidence", help="Do not write the result into the checkpoint (sparkquant/evidence).")
]


class Recording:
    """Opened before the measurement, kept after it: a folder that changes in between has no evidence.

    Folders of other producers and of the hub's cache are left alone; one of ours that cannot be written is told.
    """

    def __init__(self, folder: str | os.PathLike[str], verb: str, *, wanted: bool = True) -> None:
        from sparkquant import evidence

        self._folder, self._verb = folder, verb
        self._state = None
        root = Path(folder)
        if not wanted or not os.path.isfile(root / evidence.PLAN):  # noqa: PTH113 (False for names that cannot be)
            return
        try:
            if reason := evidence.unrecordable(root):
                _note(reason)
            else:
                self._state = evidence.state_of(root)
        except SparkquantError as error:
            _note(error.what)  # what is wrong with the folder is for the verb to find

    def keep(self, result: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Write the record; a failure is told and changes nothing else: the measurement itself is done."""
        from sparkquant import evidence

        if self._state is None:
            return
        try:
            with progress() as listener:
                digest = evidence.checkpoint_digest(self._folder, listener=listener)
            before = evidence.read(self._folder, digest=digest).get("verify") if self._verb == "verify" else None
            if before is None or not _says_more(before, result, inputs):
                evidence.record(self._folder, self._verb, result, inputs=inputs, since=self._state, digest=digest)
        except SparkquantError as error:
            _note(error.what)


def _says_more(before: Evidence, result: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
    """Whether a fresh record of a check against the source, at least as deep, says what this pass does and more."""
    from sparkquant.evidence import outcome_of
    from sparkquant.report import Status
    from sparkquant.verification.catalogue import LEVELS

    given = before.record.get("inputs", {})
    if not before.green or not given.get("source") or inputs.get("source") or outcome_of(result) is not Status.PASS:
        return False
    return given.get("level") in LEVELS and LEVELS.index(given["level"]) >= LEVELS.index(inputs["level"])


def _note(reason: str) -> None:
    console(sys.stderr).print(f"note: no evidence was kept: {clean(reason)}", style="yellow", soft_wrap=True)
