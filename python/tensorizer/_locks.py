"""Locks that a forked process does not inherit."""

from __future__ import annotations

import os
import threading


class ForkSafeLock:
    """A reentrant lock that is made anew in each forked process.

    After ``fork()`` the parent's lock may be held by a thread that does not exist in the child.
    """

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.RLock()

    def current(self) -> threading.RLock:
        """Return the lock of this process; the thread that holds it may take it again."""
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.RLock()
        return self._lock
