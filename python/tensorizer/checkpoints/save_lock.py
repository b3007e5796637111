"""The save lock, which one save of a storage file holds at a time.

The pickle and its storage file are renamed into place one after the other: two saves at once could
mix theirs.
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

#: Seconds between two attempts to take a lock that another save holds.
_POLL_SECONDS = 0.05
#: The most bytes of a file's name in the name of its hidden file, which may have 255.
_LONGEST_NAME = 150


def shortened_name(path: Path) -> str:
    """Return a file's name, shortened for use in the names of its hidden files."""
    name = path.name
    while len(os.fsencode(name)) > _LONGEST_NAME:
        name = name[:-1]
    return name


class SaveLock:
    """The save lock of a storage file, a context manager; other saves wait for its release.

    The holder removes the lock file. A process that is killed loses only the lock, and leaves the
    file to the next save. On a file system without locks, saves do not wait.

    Args:
        path: The storage file; None for no lock.

    """

    def __init__(self, path: Path | None) -> None:
        #: The lock file; None for no lock.
        self._lock_path = path and path.with_name(f".{shortened_name(path)}.tensorizer-lock")
        self._file: io.FileIO | None = None
        self._thread = threading.get_ident()

    @property
    def held(self) -> bool:
        """True while this object holds the lock."""
        return self._file is not None

    def __enter__(self) -> SaveLock:
        """Wait for the lock.

        Raises:
            RuntimeError: This thread holds the lock already: a signal handler interrupted its save.

        """
        waits = False
        # Without permission to create the lock file, no save can put a file there either.
        with contextlib.suppress(OSError):
            while self._lock_path is not None and not self._try_lock(self._lock_path):
                holder = _held.get(self._lock_path)
                if holder is not None and holder._thread == self._thread:
                    raise RuntimeError(
                        "this thread is already saving the same object, and holds "
                        f"{self._lock_path}: "
                        "a signal handler must not save an object whose save it interrupted"
                    )
                if not waits:
                    logger.warning("another save holds %s: waiting for its end", self._lock_path)
                waits = True
                time.sleep(_POLL_SECONDS)
        return self

    def _try_lock(self, lock: Path) -> bool:
        """Try once to lock the file, and return True if that worked.

        Raises an ``OSError`` where another attempt is of no use, such as on a file system without
        locks.
        """
        file = io.FileIO(os.fspath(lock), "r+", opener=_open_lock_file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file since it was opened.
            if _is_file_at(file, lock):
                self._file = file
                _held[lock] = self
        except BlockingIOError:
            return False
        except OSError:
            lock.unlink(missing_ok=True)
            raise
        finally:
            if self._file is not file:
                file.close()
        return self._file is file

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        file, lock = self._file, self._lock_path
        self._file = None
        if file is None or lock is None:
            return
        with contextlib.suppress(OSError), file:
            _held.pop(lock, None)
            if _is_file_at(file, lock):
                lock.unlink(missing_ok=True)


#: Held locks, by their lock files. References are weak: if an interrupt prevents ``__exit__``, the
#: object is freed, which closes its file and releases the lock.
_held: weakref.WeakValueDictionary[Path, SaveLock] = weakref.WeakValueDictionary()


def _in_child() -> None:
    """Close the lock files that a forked child has inherited: it would hold the locks, too."""
    for lock in list(_held.values()):
        if lock._file is not None:
            lock._file.close()
            lock._file = None
    _held.clear()


os.register_at_fork(after_in_child=_in_child)


def _open_lock_file(path: str, _: int) -> int:
    # Network file systems lock only files that are open for writing.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o666)


def _is_file_at(file: io.FileIO, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    return False
