"""Ends loads in the background before the interpreter ends."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Any

#: Objects that may have a background load, which their ``close()`` ends and waits for.
_ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(load: Any) -> None:
    """Close a load when the interpreter ends, before its threads would be stopped at any point."""
    _ALIVE.add(load)


@atexit.register
def _end() -> None:
    for load in list(_ALIVE):
        with contextlib.suppress(RuntimeError):
            load.close()
