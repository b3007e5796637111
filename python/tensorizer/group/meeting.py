"""How the members of a call meet, which an interruption of one of them must not tear apart.

Once one member has seen that all are here, all connect to each other, and each waits for the
connections of all: whoever went then would have the others wait for the time-out.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

#: What becomes of a call: one of these, which the first member that knows says.
_ALL_HERE, _ONE_LEFT, _IN_VAIN = "all are here", "one of them left", "one of them waited in vain"
#: Seconds between two looks, and those in which a thread surely begins.
_PAUSE, _BEGINS = 2e-3, 1.0


def meet(
    store: Any, rank: int, size: int, timeout: datetime.timedelta, leaves: threading.Event
) -> None:
    """Wait until all are here, or this one leaves.

    Raises:
        RuntimeError: They do not meet.

    """
    until = time.monotonic() + timeout.total_seconds()
    everybody = [f"here/{other}" for other in range(size)]
    store.set(everybody[rank], "")
    found = _ALL_HERE
    while not store.check(["outcome"]) and not store.check(everybody):
        if leaves.is_set() or time.monotonic() > until:
            found = _ONE_LEFT if leaves.is_set() else _IN_VAIN
            break
        time.sleep(_PAUSE)
    outcome = store.compare_set("outcome", "", found).decode()
    if outcome != _ALL_HERE:
        raise RuntimeError("timed out" if outcome == found == _IN_VAIN else outcome)


def uninterrupted(work: Callable[[threading.Event], None]) -> BaseException | None:
    """Do some work on a thread, which signals do not interrupt; return what interrupted this one.

    Args:
        work: Gets an event that is set when this thread is interrupted.

    Raises:
        BaseException: What the work raises, or the interruption if the work fails after it. A
            second one is raised at once.

    """
    leaves, begun = threading.Event(), threading.Event()
    ended: Future[None] = Future()

    def run() -> None:
        begun.set()
        try:
            work(leaves)
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    thread = threading.Thread(target=run, name="tensorizer-meeting", daemon=True)
    try:
        thread.start()
        ended.result()
    except BaseException as error:
        if ended.done() and ended.exception() is error:
            raise
        leaves.set()
        # It may come before the thread has begun, which then leaves at once, or never begins.
        if not begun.wait(_BEGINS) or ended.exception() is not None:
            raise
        # Frames of its traceback may have what the work has made.
        return error.with_traceback(None)
    return None
