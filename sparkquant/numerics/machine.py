"""What this process may compute with: compiled kernels or not, and how many threads. No torch."""

from __future__ import annotations

import importlib
import os
import sys


def uses_kernels() -> bool:
    """True when CPU tensors go through numba: it imports and SPARKQUANT_NUMBA is not 0."""
    if os.environ.get("SPARKQUANT_NUMBA") == "0":
        return False
    try:
        importlib.import_module("sparkquant.numerics.arrays")
    except ImportError:
        return False
    return True


def thread_count() -> int:
    """Torch's number of threads where torch is loaded; else what torch would take: OMP_NUM_THREADS, or every CPU."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) else len(os.sched_getaffinity(0))
