"""Local checkpoint folders: created durably, and cleaned of files that belong to no checkpoint."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from .._native import check_target
from ..streams.held_folder import HeldFolder
from ..streams.syncing import sync_folder
from . import layout

#: Seconds to wait for the lock of a folder.
_LOCK_TIMEOUT = 10.0
#: The names of files that ranks write, and of such files until they are complete, on file systems
#: without ``O_TMPFILE``.
_RANK_FILE = re.compile(
    r"\.?rank-[0-9]{5,}-[0-9a-f]{16}\.tensors"
    r"(\.tensorizer-[0-9a-f]{8}-[0-9a-f]{8}\.(tmp|unlocked))?"
)


class FolderLock(HeldFolder):
    """A shared lock on a folder that protects files of unfinished checkpoints from removal.

    The folder is made if necessary. The lock lasts as long as the object is referenced, and keeps
    other processes from removing files, too, if the file system has locks. Without locks no file is
    ever removed.

    Raises:
        BlockingIOError: Another process has held the exclusive lock for long.

    """

    _access = os.O_RDONLY

    def __init__(self, folder: str) -> None:
        check_target(folder)
        path = Path(folder)
        missing = [one for one in (path, *path.parents) if not one.exists()]
        path.mkdir(parents=True, exist_ok=True)
        # Synced, so that the folder and its parents survive a loss of power.
        for one in missing:
            sync_folder(one.parent)
        super().__init__(folder)
        until = time.monotonic() + _LOCK_TIMEOUT
        while not self._is_locked():
            # A process that removes files holds the exclusive lock only briefly.
            if time.monotonic() > until:
                raise BlockingIOError(
                    errno.EAGAIN,
                    f"another process has held the lock of the folder for {_LOCK_TIMEOUT:.0f} s, "
                    "and may remove the files of this save",
                    folder,
                )
            time.sleep(0.01)

    def _is_locked(self) -> bool:
        """Take the shared lock if there are locks; False if a process has the exclusive one."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return not isinstance(error, BlockingIOError)
        return True

    @staticmethod
    def _release(descriptor: int, process: int) -> None:
        # A forked child, which shares the lock, only closes its descriptor.
        if os.getpid() == process:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def check(folder: str, names: Iterable[str], shown: str) -> None:
    """Check that the files of all ranks are in a folder, before it becomes a checkpoint.

    The error shows another path of the folder.

    Raises:
        FileNotFoundError: A file is missing: the ranks have different folders by that name, or
            another job has removed it.

    """
    for name in sorted(names):
        if not Path(folder, name).exists():
            raise FileNotFoundError(
                errno.ENOENT,
                "the file of a rank is not in the folder of the checkpoint, which was not "
                "written: expected one folder for all ranks",
                str(Path(shown, name)),
            )


def remove_leftovers(folder: str) -> None:
    """Remove files of ranks that belong to no checkpoint, unless a save goes on in the folder.

    Every save holds a :class:`FolderLock` before it creates a file.
    """
    # The folder is locked or cannot be, or its checkpoint does not tell which files are its own.
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = {path.name for path in Path(folder).iterdir()}
        if layout.is_there(folder):
            found -= {*layout.read(folder)[1]}
        elif Path(folder, layout.FILE).is_symlink():
            # The link's target may come back.
            return
        remove(folder, found)


def remove(folder: str, names: Iterable[str]) -> None:
    """Remove the files of ranks among these; files that cannot be removed stay."""
    for name in names:
        if _RANK_FILE.fullmatch(name):
            with contextlib.suppress(OSError):
                Path(folder, name).unlink()
