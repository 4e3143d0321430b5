"""Verbs that measure keep what they found in the checkpoint, as evidence for the card and for `publish`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from sparkquant.cli.progress import progress
from sparkquant.cli.shell import clean, console
from sparkquant.errors import SparkquantError

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
        if wanted and os.path.isfile(os.path.join(folder, evidence.PLAN)):  # noqa: PTH113, PTH118
            if reason := evidence.unrecordable(folder):
                _note(reason)
            else:
                self._state = evidence.state_of(folder)

    def keep(self, result: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Write the record; a failure is told and changes nothing else: the measurement itself is done."""
        from sparkquant import evidence

        if self._state is None:
            return
        try:
            with progress() as listener:
                evidence.record(self._folder, self._verb, result, inputs=inputs, since=self._state, listener=listener)
        except SparkquantError as error:
            _note(error.what)


def _note(reason: str) -> None:
    console(sys.stderr).print(f"note: no evidence was kept: {clean(reason)}", style="yellow", soft_wrap=True)
