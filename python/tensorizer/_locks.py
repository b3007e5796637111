"""Locks that a forked process does not inherit."""

from __future__ import annotations

import os
import threading


class OwnLock:
    """A lock that each process has for itself.

    In one that was forked off, that of the parent may be held by a thread which is not there.
    """

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.RLock()

    def here(self) -> threading.RLock:
        """Return that of this process; a thread that has it may take it again."""
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.RLock()
        return self._lock
