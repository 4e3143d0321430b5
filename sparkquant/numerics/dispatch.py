"""Who computes: compiled kernels on CPU threads, or plain torch. Decided here and nowhere else.

Both engines offer the same functions on a chunk of rows and give the same bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from sparkquant.numerics.machine import thread_count, uses_kernels

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

# A chunk and its scratch memory stay in a core's second-level cache; a GPU wants it bigger.
_CPU_CHUNK = 1 << 18
_GPU_CHUNK = 1 << 25

Job = TypeVar("Job")
Result = TypeVar("Result")


def engine(tensor: Tensor) -> ModuleType:
    """The module that computes for this tensor: ``compiled`` or ``reference``."""
    name = "compiled" if tensor.device.type == "cpu" and uses_kernels() else "reference"
    return importlib.import_module(f"sparkquant.numerics.{name}")


def chunk_elements(tensor: Tensor) -> int:
    """How many elements one job should hold."""
    return _CPU_CHUNK if tensor.device.type == "cpu" else _GPU_CHUNK


def row_jobs(weight: Tensor, multiple: int = 1) -> list[tuple[int, slice]]:
    """Cut [E, N, K] into (matrix, rows) jobs; each but the last has a multiple of `multiple` rows."""
    matrices, rows, columns = weight.shape
    step = -(-chunk_elements(weight) // max(columns, 1))
    step = -(-step // multiple) * multiple
    return [
        (matrix, slice(start, min(start + step, rows))) for matrix in range(matrices) for start in range(0, rows, step)
    ]


def run(work: Callable[[Job], Result], jobs: Iterable[Job], tensor: Tensor) -> list[Result]:
    """Call `work` on each job and return the results in order.

    Kernels release the GIL and share torch's thread count. Plain torch has its own threads.
    """
    jobs = list(jobs)
    threads = min(thread_count(), len(jobs))
    if threads < 2 or tensor.device.type != "cpu" or not uses_kernels():
        return [work(job) for job in jobs]
    with ThreadPoolExecutor(threads, thread_name_prefix="numerics") as pool:
        return list(pool.map(work, jobs))


def as_matrices(weight: Tensor) -> Tensor:
    """View a contiguous floating [N, K] or [E, N, K] tensor as [E, N, K], or raise ValueError."""
    if weight.ndim not in (2, 3):
        raise ValueError(f"a weight has shape [N, K] or [E, N, K], got {tuple(weight.shape)}")
    if weight.dtype not in FLOATS:
        raise ValueError(f"a weight is bfloat16, float16 or float32, got {weight.dtype}")
    if not weight.is_contiguous():
        raise ValueError(f"a weight must be contiguous, got strides {weight.stride()}")
    weight = weight.detach()
    return weight if weight.ndim == 3 else weight.unsqueeze(0)


def as_importance(importance: Tensor | None, weight: Tensor, search: bool) -> Tensor | None:
    """Check per-column importance ([K], or [E, K] for [E, N, K]) and view it as [E, K]."""
    if importance is None:
        return None
    if not search:
        raise ValueError("importance weights the scale search; without search it has no effect")
    experts, columns = weight.shape[0], weight.shape[-1]
    if importance.dtype is not torch.float32 or importance.device != weight.device:
        raise ValueError(
            f"importance must be float32 on {weight.device}, got {importance.dtype} on {importance.device}"
        )
    if tuple(importance.shape) not in ((columns,), (experts, columns)):
        raise ValueError(
            f"importance must have shape [{columns}] or [{experts}, {columns}], got {tuple(importance.shape)}"
        )
    return importance.detach().expand(experts, columns).contiguous()
