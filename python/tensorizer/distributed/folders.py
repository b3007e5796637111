"""Local folders of checkpoints: made so that they stay, and rid of what nobody needs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

from ..streams.syncing import sync_folder
from . import layout

#: Seconds that the lock of a folder is waited for.
_PATIENCE = 10.0
#: Files that ranks write, and no others.
_OURS = re.compile(r"rank-[0-9]{5,}-[0-9a-f]{16}\.tensors")
#: What they are called until they are whole, where files without a name cannot be had.
_UNDONE = re.compile(rf"\.{_OURS.pattern}\.tensorizer-[0-9a-f]{{8}}-[0-9a-f]{{8}}\.(tmp|unlocked)")


def make(folder: str) -> None:
    """Make a folder, and those above it, that are there when the machine has lost its power."""
    path = Path(folder)
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync_folder(one.parent)


class Claim:
    """Keeps files in a folder that no checkpoint has yet, as long as it is referred to.

    Of other processes too, if the file system has locks; without them no file is removed.
    """

    def __init__(self, folder: str) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, _release, descriptor, os.getpid())
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                # Whoever removes files holds it for a moment only.
                if time.monotonic() > until:
                    raise BlockingIOError(
                        error.errno,
                        f"another process has had the lock of the folder for {_PATIENCE:.0f} s, "
                        "and may remove what is written",
                        folder,
                    ) from None
                time.sleep(0.01)
            except OSError:
                return


def _release(descriptor: int, process: int) -> None:
    """Give a lock back, which a process that was forked off since has too."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def check(folder: str, names: Iterable[str]) -> None:
    """Make sure that the files of all ranks are in a folder, before it becomes a checkpoint.

    Raises:
        FileNotFoundError: One is not: the ranks have folders of their own by that name, or another
            job has removed it.

    """
    for name in sorted(names):
        if not Path(folder, name).exists():
            raise FileNotFoundError(
                errno.ENOENT,
                "the file of a rank is not in the folder of the checkpoint, which was not "
                "written: expected one folder for all ranks",
                str(Path(folder, name)),
            )


def remove_leftovers(folder: str) -> None:
    """Remove files of ranks that belong to no checkpoint, unless a save goes on in the folder.

    Whoever saves holds a :class:`Claim` before there is a file of its own.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = {path.name for path in Path(folder).iterdir()}
        if layout.is_there(folder):
            found -= set(layout.files(folder))
        elif Path(folder, layout.FILE).is_symlink():
            # It may come back.
            return
        remove(folder, found)
    except (OSError, ValueError):
        # Locked, or without locks, or the checkpoint does not say which files are its own.
        pass
    finally:
        os.close(descriptor)


def remove(folder: str, names: Iterable[str]) -> None:
    """Remove those files that are of ranks, as far as that is possible."""
    for name in names:
        if _OURS.fullmatch(name) or _UNDONE.fullmatch(name):
            with contextlib.suppress(OSError):
                Path(folder, name).unlink()
