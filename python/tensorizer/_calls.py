"""The calls of functions: their time limits, and their end when the program ends."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import thread as pools
from typing import Any, TypeVar

from ._native import Call

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ending = threading.Event()
# Called before the interpreter waits for threads, and before pools wait for theirs: those that were
# registered later come first.
threading._register_atexit(_ending.set)  # type: ignore[attr-defined]


def limited(function: _Function, saves: bool = False) -> _Function:
    """Let a function take at most the seconds of its argument ``timeout``, which may be None."""
    name = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with Call(name, kwargs.get("timeout"), saves):
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


#: The same for a function that writes.
limited_save = functools.partial(limited, saves=True)


def is_ending() -> bool:
    """Tell whether the interpreter ends, or the pool of this thread while the program leaves.

    Before the interpreter ends, ``asyncio.run()`` and ``with ThreadPoolExecutor()`` wait for the
    threads of their pool. A block that was left by an ordinary exception, or by none, waits for
    their results; one that was left by ``SystemExit``, ``KeyboardInterrupt`` or the cancellation of
    a task does not use them.
    The interpreter does not wait for daemon threads.
    """
    if _ending.is_set():
        return not threading.current_thread().daemon
    pool = _pool_of_this_thread()
    if pool is None or not pool._shutdown:
        return False
    if threading.current_thread().name.startswith("asyncio_"):
        return True
    handled: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
    return error is not None and not isinstance(error, Exception)


def _pool_of_this_thread() -> Any:
    """Return the pool that runs this code; None if there is none."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not pools._worker.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return None
    found = frame.f_locals
    pool = found["executor_reference"]()
    if sys.version_info < (3, 13):
        # Kept with the frame, it would keep the result of the work, too.
        found.clear()
    return pool
