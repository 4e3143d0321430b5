"""Which backend carries out a plan's method, and what it will say of its work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkquant.backends import Backend
from sparkquant.backends.bands import BandBackend
from sparkquant.decisions import Plan
from sparkquant.events import Listener
from sparkquant.quantizers import quantizer_of
from sparkquant.recipe import Recipe
from sparkquant.source import Source

if TYPE_CHECKING:
    from sparkquant.calibration.calibration_set import CalibrationSet

Records = dict[str, dict[str, Any]]
"""What a result keeps about its making: file name below sparkquant/ without its ending, and content."""


def require_method(recipe: Recipe) -> None:
    """EnvironmentMissing when the package behind the method is not there: known before any work."""
    quantizer = quantizer_of(recipe.method)
    if quantizer is not None:
        quantizer.require()


@contextmanager
def chosen_backend(
    plan: Plan,
    source: Source,
    calibration: CalibrationSet | None,
    job: Mapping[str, Any],
    target: Path,
    *,
    device: str,
    max_memory: int | None,
    listener: Listener,
) -> Iterator[tuple[Backend, Records]]:
    """The backend of the recipe's method, ready to hand out tensors, and its records.

    What needs calibration or another package has done its work before this yields.
    """
    method = plan.recipe.method
    options: dict[str, Any] = {"device": device, "max_memory": max_memory, "listener": listener}
    if method.delegated:
        from sparkquant.delegated import delegated_backend

        with delegated_backend(plan, source, calibration, job, target, **options) as (backend, record):
            given = {"calibration": calibration.record()} if calibration is not None else {}
            seen = {"calibration": {"method": method.as_json(), **given}} if given else {}
            yield backend, {**seen, "backend": record}
    elif calibration is not None:
        from sparkquant.calibrated import calibrated_backend

        with calibrated_backend(plan, source, calibration, job, target, **options) as (prepared, record):
            yield prepared, {"calibration": record}
    else:
        yield BandBackend(method.name), {}
