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
_LEFT = "left"
#: Seconds that a member waits before it checks for the key, and between two checks.
_PAUSE = 0.5
#: Seconds that a member goes on waiting after the store is lost.
_STORE_LOST = 2.0


def tell(store: Any) -> None:
    """Announce that this process leaves, without waiting long for the store."""
    _aside(lambda: store.set(_LEFT, "")).join(_PAUSE)


def let_go(groups: list[Any]) -> None:
    """Drop the last references to connections on a thread: that waits for messages under way."""
    _aside(groups.clear)


@contextlib.contextmanager
def watch(store: Any) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells, while a member waits, whether another one has left."""
    looks_from = time.monotonic() + _PAUSE
    left, done = threading.Event(), threading.Event()
    thread: threading.Thread | None = None

    def look() -> None:
        # The store itself may not answer. It is lost when the process that hosts it ends; if that
        # process has completed the call, all others soon have, too.
        found = False
        while not found and not done.wait(_PAUSE):
            try:
                found = store.check([_LEFT])
            except RuntimeError:
                found = not done.wait(_STORE_LOST)
        if found:
            left.set()

    def has_left() -> bool:
        nonlocal thread
        if thread is None and time.monotonic() > looks_from:
            thread = _aside(look)
        return left.is_set()

    try:
        yield has_left
    finally:
        done.set()
        if thread is not None:
            thread.join(_PAUSE)


def end() -> None:
    """Wait up to a second for threads that still run, before the interpreter ends."""
    until = time.monotonic() + 2 * _PAUSE
    for thread in list(_running):
        thread.join(max(0.0, until - time.monotonic()))


_running: set[threading.Thread] = set()


def _aside(work: Callable[[], None]) -> threading.Thread:
    def quietly() -> None:
        with contextlib.suppress(RuntimeError):
            work()
        _running.discard(thread)

    thread = threading.Thread(target=quietly, name="tensorizer-left", daemon=True)
    _running.add(thread)
    thread.start()
    return thread
