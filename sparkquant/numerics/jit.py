"""How a kernel is compiled: without the GIL, without fast math, with a cache that may fail.

Only the ``kernels_*`` modules import this one, and they are imported when first used: numba
costs half a second and a plan never needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import extending
from numba.core import caching

Function = TypeVar("Function", bound=Callable[..., Any])

# numba notices a change of the file that defines a kernel, not of the helpers it calls.
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("kernels_*.py")))
).hexdigest()


# Not every numba release has type hints for its caches.
_FunctionCache: Any = caching.FunctionCache


class _ForgivingCache(_FunctionCache):  # type: ignore[misc]
    """Compiled code on disk. Files that cannot be read or written cost a compilation, no more."""

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), _SOURCES)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception:
            return


def jit(function: Function) -> Function:
    """Compile `function` on its first call; keep the machine code on disk where that works."""
    # error_model numpy: a test for a zero divisor would keep loops from vectorizing.
    dispatcher: Any = numba.njit(nogil=True, fastmath=False, error_model="numpy")(function)
    # Where no directory can be written numba raises: then each process compiles once.
    with contextlib.suppress(Exception):
        dispatcher._cache = _ForgivingCache(function)
    return cast(Function, dispatcher)


def by_width(narrow: Function, wide: Function) -> Function:
    """A function of one scalar for use in kernels: `narrow` for uint16, `wide` for anything else.

    The choice is made when the kernel is compiled: a test in the loop would keep it from vectorizing.
    """

    def call(value: Any) -> Any:
        return narrow(value) if value.dtype.itemsize == 2 else wide(value)

    @extending.overload(call)
    def choose(value: Any) -> Any:
        return narrow if value == numba.types.uint16 else wide

    del choose
    chosen: Any = call
    return cast(Function, chosen)
