"""Savers of one file of storages take turns.

Its two halves get their names one after the other, so that two savers at once would mix theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import threading
import time
import weakref
from pathlib import Path

logger = logging.getLogger("tensorizer.torch_compat")

#: Seconds between two looks at a lock that another saver holds.
_POLL = 0.05
#: So many bytes of a name are part of that of a hidden file, which may have 255.
_SHOWN = 150


def shown(path: Path) -> str:
    """Return how the hidden names of what belongs to a file begin, after their dot."""
    name = path.name
    while len(os.fsencode(name)) > _SHOWN:
        name = name[:-1]
    return name


def lock_of(path: Path) -> Path:
    """Return the hidden file that a saver of a file holds locked."""
    return path.with_name(f".{shown(path)}.tensorizer-lock")


class Turn:
    """The turn of one saver, a context manager; the next one waits until it has ended.

    Whoever holds the lock removes the locked file. A process that is killed loses the lock only,
    and leaves the file to the next saver. Where locks do not work, nobody waits.

    Args:
        path: The file of storages; None for nothing to wait for.

    """

    def __init__(self, path: Path | None) -> None:
        self._lock = None if path is None else lock_of(path)
        self._file: io.FileIO | None = None
        self._thread = threading.get_ident()

    @property
    def held(self) -> bool:
        """Whether no other saver has its turn."""
        return self._file is not None

    def __enter__(self) -> Turn:
        """Wait for the turn.

        Raises:
            RuntimeError: This thread has it already: it was interrupted by a handler of signals.

        """
        waits = False
        # Without the permission to make a file there, no saver gets further.
        with contextlib.suppress(OSError):
            while self._lock is not None and not self._take(self._lock):
                holder = _held.get(self._lock)
                if holder is not None and holder._thread == self._thread:
                    raise RuntimeError(
                        f"a save within a save of the same object, which holds {self._lock}: the "
                        "handler of a signal should let the save end that it has interrupted"
                    )
                if not waits:
                    logger.warning("another save holds %s: waiting for its end", self._lock)
                waits = True
                time.sleep(_POLL)
        return self

    def _take(self, lock: Path) -> bool:
        """Try to get the lock; it is not for another try where there are none."""
        file = io.FileIO(os.fspath(lock), "r+", opener=_create)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_named(file, lock):
                # The one before has removed it since it was opened.
                file.close()
                return False
            self._file = file
            _held[lock] = self
        except BlockingIOError:
            file.close()
            return False
        except OSError:
            lock.unlink(missing_ok=True)
            file.close()
            raise
        except BaseException:
            file.close()
            raise
        return True

    def __exit__(self, *_: object) -> None:
        """End the turn."""
        file, lock = self._file, self._lock
        self._file = None
        if file is None or lock is None:
            return
        with contextlib.suppress(OSError), file:
            _held.pop(lock, None)
            if _is_named(file, lock):
                lock.unlink(missing_ok=True)

    def _leave_to_the_parent(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


#: By their locked files. One that an interrupt has kept from ending gives up its lock with itself.
_held: weakref.WeakValueDictionary[Path, Turn] = weakref.WeakValueDictionary()


def _in_child() -> None:
    """Close what a process that was forked off has of locks: it would hold them, too."""
    for turn in list(_held.values()):
        turn._leave_to_the_parent()
    _held.clear()


os.register_at_fork(after_in_child=_in_child)


def _create(path: str, _: int) -> int:
    # Locks of network file systems need a file for writing.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o666)


def _is_named(file: io.FileIO, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    return False
