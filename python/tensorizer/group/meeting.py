"""How the members of a call meet, which an interruption of one of them must not tear apart.

Once one member has seen that all are here, all connect to each other, and each waits for the
connections of all: whoever went then would have the others wait for the time-out.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

#: What becomes of a call: one of these, which the first member that knows says.
_ALL_HERE, _ONE_LEFT, _IN_VAIN = "all are here", "one of them left", "one of them waited in vain"
#: Seconds between two looks: at first, at most of few members, and for each where there are more,
#: which one store answers.
_PAUSE, _LONGEST_PAUSE, _PAUSE_FOR_EACH = 1e-3, 5e-3, 2e-4


def meet(
    store: Any, size: int, timeout: datetime.timedelta, leaves: threading.Event, told: str
) -> bool:
    """Wait until all are here, or this one leaves; return whether all tell the same.

    The requests of each member to the store do not become more with the number of members, and it
    asks the less often the more there are.

    Args:
        store: Where they meet.
        size: Their number.
        timeout: How long they are waited for.
        leaves: Set when this one leaves.
        told: What this one tells.

    Raises:
        RuntimeError: They do not meet.

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
    """Do some work on a thread, which signals do not interrupt.

    Args:
        work: Gets an event that is set when this thread is interrupted.

    Returns:
        What has interrupted this thread, if something has, and what the work has raised.

    Raises:
        BaseException: A second interruption, at once.

    """
    leaves, ended = threading.Event(), threading.Event()
    # Whoever takes it does the work, once.
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
            # Asleep, it sees every kind of interruption.
            while not ended.is_set():
                time.sleep(_PAUSE)
        except BaseException as error:
            leaves.set()
            if interruption is not None:
                raise
            # Frames of its traceback may have what the work has made.
            interruption = error.with_traceback(None)
            # There may be no thread yet.
            run()
    return interruption, failed.pop() if failed else None


def _begin(work: Callable[[], None]) -> None:
    """Have a thread do something, or do it here where there can be none."""
    try:
        _thread.start_new_thread(work, ())
    except RuntimeError:
        work()
