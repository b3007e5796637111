"""How a member leaves a call: it tells the others by way of their store.

Those that wait for it need not see an end of its connections: gloo keeps them while anything is
being sent or received, until the time-out.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

#: The key in the store of a call.
_LEFT = "left"
#: Seconds that a member waits before it looks for the key, and between two looks.
_PAUSE = 0.5
#: Seconds that it goes on waiting when the store is lost.
_STORE_LOST = 2.0


def tell(store: Any) -> None:
    """Say that this process leaves. A store that does not answer is not waited for."""
    _aside(lambda: store.set(_LEFT, "")).join(_PAUSE)


def let_go(groups: list[Any]) -> None:
    """Drop the last references to connections, which waits for what is being sent or received."""
    _aside(groups.clear)


@contextlib.contextmanager
def watch(store: Any) -> Iterator[Callable[[], bool]]:
    """Give a function that tells, while a member waits, whether another has left."""
    looks_from = time.monotonic() + _PAUSE
    left, done = threading.Event(), threading.Event()
    thread: threading.Thread | None = None

    def look() -> None:
        # The store itself may stand still. It is lost with the process that has it, which may be
        # through with the call, and then all others soon are.
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
    """Wait a while for what is still being done, before the interpreter ends."""
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
