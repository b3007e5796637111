"""Names in local folders that are there when the machine has lost its power."""

from __future__ import annotations

import errno
import os

#: Of folders that may not be read, and of file systems that do not sync folders.
_CANNOT = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Have the names in a folder on the disk; where folders cannot be synced, do nothing.

    Raises:
        OSError: The disk has failed; it names the folder.

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
