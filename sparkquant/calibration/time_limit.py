"""A limit on how long a piece of Python may run, in any thread: a chat template from somewhere may loop for ever."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType


class OutOfTime(BaseException):
    """Not an Exception: a template engine must not take it for a fault of its own and go on."""


class TimeLimit:
    """`with TimeLimit(5):` raises OutOfTime inside the block after five seconds of Python code.

    A signal would do in the main thread only. A call into C is not interrupted, only what comes after it.
    """

    def __init__(self, seconds: float) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._over = False
        self._fired = False
        self._timer = threading.Timer(seconds, self._fire)
        self._timer.daemon = True

    def _fire(self) -> None:
        with self._lock:
            if not self._over:
                self._fired = True
                self._raise_there(ctypes.py_object(OutOfTime))

    def _raise_there(self, exception: object) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), exception)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._fired and kind is not OutOfTime:
                self._raise_there(None)  # still on its way: call it back
