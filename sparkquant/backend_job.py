"""What a backend is asked to do, and under which name its unfinished work is found again. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkquant.decisions import Plan
from sparkquant.events import Listener
from sparkquant.source import Source

if TYPE_CHECKING:
    from sparkquant.calibration.calibration_set import CalibrationSet


@dataclass(frozen=True)
class BackendJob:
    """Carry out a plan's method.

    calibration   rows for a calibrated method; None for the others
    identity      what makes two runs the same job
    target        the result's folder: work is kept outside of it
    max_memory    bytes that may be used, None for all that is available
    """

    plan: Plan
    source: Source
    calibration: CalibrationSet | None
    identity: Mapping[str, Any]
    target: Path
    device: str
    max_memory: int | None
    listener: Listener

    @property
    def key(self) -> str:
        """Name of its work folder."""
        return work_key(self.identity)


def work_key(identity: Mapping[str, Any]) -> str:
    """Name of the work folder of a job."""
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:32]
