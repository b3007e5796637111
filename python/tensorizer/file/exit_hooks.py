"""Ends loads in the background before the interpreter ends."""

from __future__ import annotations

import atexit
import contextlib
import weakref
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


@atexit.register
def _end() -> None:
    for load in list(_ALIVE):
        with contextlib.suppress(RuntimeError):
            load.close()
