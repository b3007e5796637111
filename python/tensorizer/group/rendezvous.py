"""The rendezvous of the members of a call, which an interruption must not break off half-way.

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

#: The possible outcomes of a rendezvous; the first member that knows the outcome stores it.
_ALL_ARRIVED, _ONE_LEFT = "all arrived", "another member left"
_TIMED_OUT = "another member timed out"
#: Seconds between two checks of the store: at first; at most, with few members; and, with many, for
#: each member, as one store serves all of them.
_PAUSE, _LONGEST_PAUSE, _PAUSE_FOR_EACH = 1e-3, 5e-3, 2e-4


def rendezvous(
    store: Any, size: int, timeout: datetime.timedelta, leaving: threading.Event, value: str
) -> bool:
    """Wait until all members arrive or this one leaves; return True if all have the same value.

    The number of each member's requests to the store does not grow with the number of members, and
    the more members there are, the less often it asks.

    Args:
        store: The store of the call.
        size: The number of members.
        timeout: The time to wait at most.
        leaving: Set when this member leaves.
        value: A text of this member, to be compared with those of the others.

    Raises:
        RuntimeError: A member has left, or did not arrive in time.

    """
    deadline = time.monotonic() + timeout.total_seconds()
    pause, longest = _PAUSE, max(_LONGEST_PAUSE, size * _PAUSE_FOR_EACH)
    own_outcome = _ALL_ARRIVED
    try:
        store.add(f"told/{value}", 1)
        here = store.add("here", 1)
        while here < size and not store.check(["outcome"]):
            if leaving.is_set() or time.monotonic() > deadline:
                own_outcome = _ONE_LEFT if leaving.is_set() else _TIMED_OUT
                break
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
        outcome = store.compare_set("outcome", "", own_outcome).decode()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            store.compare_set("outcome", "", _ONE_LEFT)
        raise
    if outcome != _ALL_ARRIVED:
        raise RuntimeError("timed out" if outcome == own_outcome == _TIMED_OUT else outcome)
    return bool(store.add(f"told/{value}", 0) == size)


def run_uninterrupted(
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
    leaving, ended = threading.Event(), threading.Event()
    # The thread that pops the item does the work, so that it is done once.
    claim: list[None] = [None]
    failed: list[BaseException] = []

    def run() -> None:
        with contextlib.suppress(IndexError):
            claim.pop()
            try:
                work(leaving)
            except BaseException as error:
                failed.append(error)
            finally:
                ended.set()

    interruption: BaseException | None = None
    started = False
    while not ended.is_set():
        try:
            if not started:
                started = True
                _start(run)
            # A sleep is ended by every kind of interruption.
            while not ended.is_set():
                time.sleep(_PAUSE)
        except BaseException as error:
            leaving.set()
            if interruption is not None:
                raise
            # The frames of its traceback may hold objects that the work has made.
            interruption = error.with_traceback(None)
            # The thread may not have been started.
            run()
    return interruption, failed.pop() if failed else None


def _start(work: Callable[[], None]) -> None:
    """Run a function on a thread, or here if no thread can be started."""
    try:
        _thread.start_new_thread(work, ())
    except RuntimeError:
        work()
