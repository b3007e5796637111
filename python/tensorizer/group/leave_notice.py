"""The notice that a member leaves a call, given to the others through the call's store.

Members that wait for it may not see its connections end: gloo keeps them until the time-out while
anything is being sent or received.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

#: The key in the store of a call that means that a member has left.
_LEFT_KEY = "left"
#: Seconds that a member waits before it checks for the key, and between two checks.
_POLL_SECONDS = 0.5
#: Seconds that a member goes on waiting after the store is lost.
_STORE_LOST_SECONDS = 2.0


def announce(store: Any) -> None:
    """Announce that this process leaves, without waiting long for the store."""
    _run_in_background(lambda: store.set(_LEFT_KEY, "")).join(_POLL_SECONDS)


def release_in_background(groups: list[Any]) -> None:
    """Drop the last references to connections on a thread: that waits for messages under way."""
    _run_in_background(groups.clear)


@contextlib.contextmanager
def watch(store: Any) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells, while a member waits, whether another one has left."""
    polls_from = time.monotonic() + _POLL_SECONDS
    left, done = threading.Event(), threading.Event()
    thread: threading.Thread | None = None

    def poll_store() -> None:
        # The store itself may not respond. It is lost when the process that hosts it ends; if that
        # process has completed the call, all others soon have, too.
        found = False
        while not found and not done.wait(_POLL_SECONDS):
            try:
                found = store.check([_LEFT_KEY])
            except RuntimeError:
                found = not done.wait(_STORE_LOST_SECONDS)
        if found:
            left.set()

    def has_left() -> bool:
        nonlocal thread
        if thread is None and time.monotonic() > polls_from:
            thread = _run_in_background(poll_store)
        return left.is_set()

    try:
        yield has_left
    finally:
        done.set()
        if thread is not None:
            thread.join(_POLL_SECONDS)


def join_threads() -> None:
    """Wait up to a second for threads that still run, before the interpreter ends."""
    until = time.monotonic() + 2 * _POLL_SECONDS
    for thread in list(_running):
        thread.join(max(0.0, until - time.monotonic()))


_running: set[threading.Thread] = set()


def _run_in_background(work: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(RuntimeError):
            work()
        _running.discard(thread)

    thread = threading.Thread(target=run, name="tensorizer-left", daemon=True)
    _running.add(thread)
    try:
        thread.start()
    except RuntimeError:
        # There are too many threads. The others find out when the connections end.
        _running.discard(thread)
    return thread
