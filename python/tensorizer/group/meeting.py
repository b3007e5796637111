"""The meeting of the members of a call, which an interruption must not break off half-way.

Once one member has seen that all have arrived, all connect to each other, and each waits for the
connections of all. If a member left then, the others would wait until the time-out.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

#: The possible outcomes of a meeting; the first member that knows the outcome stores it.
_ALL_HERE, _ONE_LEFT, _IN_VAIN = "all are here", "one of them left", "one of them waited in vain"
#: Seconds between two checks of the store: at first; at most, with few members; and, with many, for
#: each member, as one store answers all of them.
_PAUSE, _LONGEST_PAUSE, _PAUSE_FOR_EACH = 1e-3, 5e-3, 2e-4


def meet(
    store: Any, size: int, timeout: datetime.timedelta, leaves: threading.Event, told: str
) -> bool:
    """Wait until all members arrive or this one leaves; return True if all tell the same.

    The number of each member's requests to the store does not grow with the number of members, and
    the more members there are, the less often it asks.

    Args:
        store: The store of the call.
        size: The number of members.
        timeout: The time to wait at most.
        leaves: Set when this member leaves.
        told: The text that this member tells.

    Raises:
        RuntimeError: A member has left, or did not arrive in time.

    """
    until = time.monotonic() + timeout.total_seconds()
    pause, longest = _PAUSE, max(_LONGEST_PAUSE, size * _PAUSE_FOR_EACH)
    found = _ALL_HERE
    try:
        store.add(f"told/{told}", 1)
        here = store.add("here", 1)
        while here < size and not store.check(["outcome"]):
            if leaves.is_set() or time.monotonic() > until:
                found = _ONE_LEFT if leaves.is_set() else _IN_VAIN
                break
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
        outcome = store.compare_set("outcome", "", found).decode()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            store.compare_set("outcome", "", _ONE_LEFT)
        raise
    if outcome != _ALL_HERE:
        raise RuntimeError("timed out" if outcome == found == _IN_VAIN else outcome)
    return bool(store.add(f"told/{told}", 0) == size)


def uninterrupted(
    work: Callable[[threading.Event], None],
) -> tuple[BaseException | None, BaseException | None]:
    """Run some work on a thread, which signals do not interrupt.

    Args:
        work: Called with an event that is set when the calling thread is interrupted.

    Returns:
        The interruption of the calling thread, and the error of the work; each may be None.

    Raises:
        BaseException: A second interruption, at once.

    """
    leaves, ended = threading.Event(), threading.Event()
    # The thread that pops the item does the work, so that it is done once.
    claim: list[None] = [None]
    failed: list[BaseException] = []

    def run() -> None:
        with contextlib.suppress(IndexError):
            claim.pop()
            try:
                work(leaves)
            except BaseException as error:
                failed.append(error)
            finally:
                ended.set()

    interruption: BaseException | None = None
    begun = False
    while not ended.is_set():
        try:
            if not begun:
                begun = True
                _begin(run)
            # A sleep is ended by every kind of interruption.
            while not ended.is_set():
                time.sleep(_PAUSE)
        except BaseException as error:
            leaves.set()
            if interruption is not None:
                raise
            # The frames of its traceback may hold objects that the work has made.
            interruption = error.with_traceback(None)
            # The thread may not have been started.
            run()
    return interruption, failed.pop() if failed else None


def _begin(work: Callable[[], None]) -> None:
    """Run a function on a thread, or here if no thread can be started."""
    try:
        _thread.start_new_thread(work, ())
    except RuntimeError:
        work()
