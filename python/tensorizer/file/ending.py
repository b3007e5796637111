"""Loads in the background, ended before the interpreter is."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Protocol


class Closes(Protocol):
    """A load in the background."""

    def close(self) -> None:
        """End the load, and wait for it."""


#: Objects that may have a load under way.
_ALIVE: weakref.WeakSet[Closes] = weakref.WeakSet()


def close_at_exit(load: Closes) -> None:
    """Have a load closed when the interpreter ends, whose end would stop its threads anywhere."""
    _ALIVE.add(load)


@atexit.register
def _close_all() -> None:
    for load in list(_ALIVE):
        with contextlib.suppress(RuntimeError):
            load.close()
