"""Which backend carries out a plan's method, and what it will say of its work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparkquant.backend_job import BackendJob
from sparkquant.backends import Backend
from sparkquant.backends.bands import BandBackend
from sparkquant.decisions import Plan
from sparkquant.quantizers import quantizer_of

Records = dict[str, dict[str, Any]]
"""What a result keeps about its making: file name below sparkquant/ without its ending, and content."""


def require_method(plan: Plan, *, device: str, max_memory: int | None) -> None:
    """Errors when the package behind the method, its device or memory is not there: known before a folder is made."""
    quantizer = quantizer_of(plan.recipe.method)
    if quantizer is not None:
        quantizer.require()
        from sparkquant.delegated import require_machine

        require_machine(plan, device=device, max_memory=max_memory)


@contextmanager
def chosen_backend(job: BackendJob) -> Iterator[tuple[Backend, Records]]:
    """The backend of the recipe's method, ready to hand out tensors, and its records.

    What needs calibration or another package has done its work before this yields.
    """
    method = job.plan.recipe.method
    if method.delegated:
        from sparkquant.delegated import delegated_backend

        with delegated_backend(job) as (backend, record):
            given = {"calibration": job.calibration.record()} if job.calibration is not None else {}
            seen = {"calibration": {"method": method.as_json(), **given}} if given else {}
            yield backend, {**seen, "backend": record}
    elif job.calibration is not None:
        from sparkquant.calibrated import calibrated_backend

        with calibrated_backend(job, job.calibration) as (prepared, record):
            yield prepared, {"calibration": record}
    else:
        yield BandBackend(method.name), {}
