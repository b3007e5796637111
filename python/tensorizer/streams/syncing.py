"""Syncs folders to disk, so that the names in them survive a loss of power."""

from __future__ import annotations

import errno
import os

#: Errors for folders that may not be read, and of file systems that do not sync folders.
_CANNOT = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Sync the names in a folder to disk; do nothing where folders cannot be synced.

    Raises:
        OSError: The disk has failed; the error names the folder.

    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise OSError(error.errno, os.strerror(error.errno or 0), os.fspath(folder)) from None
