"""Tells whether the program ends while a thread loads, so that nothing waits for the result."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import thread as pools
from types import FrameType
from typing import Any

_ending = threading.Event()
# Called before the interpreter waits for threads, and before pools wait for theirs: those that were
# registered later come first.
threading._register_atexit(_ending.set)  # type: ignore[attr-defined]


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
    pool = _pool_of(sys._getframe())
    if pool is None or not pool._shutdown:
        return False
    if threading.current_thread().name.startswith("asyncio_"):
        return True
    handled: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
    return error is not None and not isinstance(error, Exception)


def _pool_of(frame: FrameType | None) -> Any:
    """Return the pool that runs the code of a frame; None if there is none."""
    while frame is not None:
        if frame.f_code is pools._worker.__code__:
            found = frame.f_locals
            pool = found["executor_reference"]()
            if sys.version_info < (3, 13):
                # Kept with the frame, it would keep the result of the work, too.
                found.clear()
            return pool
        frame = frame.f_back
    return None
