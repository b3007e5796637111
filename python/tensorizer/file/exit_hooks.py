"""Ends loads and saves in the background before the interpreter ends."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable
from typing import Protocol


class Closeable(Protocol):
    """A load in the background."""

    def close(self) -> None:
        """End the load, and wait for it."""


#: Objects that may have a background load.
_ALIVE: weakref.WeakSet[Closeable] = weakref.WeakSet()


def close_at_exit(load: Closeable) -> None:
    """Close a load when the interpreter ends, before its threads would be stopped at any point."""
    _ALIVE.add(load)


#: Functions to call when the interpreter ends, after the loads are closed.
_FUNCTIONS: list[Callable[[], None]] = []
#: Not empty once they have been called. Threads that are started later cannot be waited for.
ENDING: list[bool] = []


def call_at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function when the interpreter ends, also if a handler of ``atexit`` has added it."""
    _FUNCTIONS.append(function)
    return function


@atexit.register
def _end() -> None:
    for load in list(_ALIVE):
        with contextlib.suppress(RuntimeError):
            load.close()
    for function in _FUNCTIONS:
        function()
    ENDING.append(True)
