"""The exception classes of this package. The native module raises them by name."""

from __future__ import annotations

from typing import Any

import torch


class FormatError(ValueError):
    """The bytes are not a valid file of their format."""


class TruncatedError(FormatError, OSError):
    """The file ends before the length that its headers state."""


class InvalidVersionError(ValueError):
    """The file's data version is not supported by this release.

    Attributes:
        version: The version found in the file.

    """

    def __init__(self, *args: Any, version: int | None = None) -> None:
        if version is None and len(args) == 2:
            # The native module passes the message and the version as positional arguments.
            message, version = args
            args = (message,)
        super().__init__(*args)
        self.version = version


class ClosedError(ValueError, RuntimeError):
    """The file was closed before the requested tensor was loaded."""


class HashMismatchError(Exception):
    """A tensor's bytes are not those that were hashed when it was written."""


class DamagedFileError(HashMismatchError):
    """A file's bytes do not match the hash that its hub publishes."""


class PairMismatchError(ValueError):
    """A ``.pt`` file and a file of storages are not the two halves of one object."""


class DeviceError(RuntimeError):
    """A device or its driver refused a request, or the device was lost."""


class DeviceMemoryError(MemoryError, torch.OutOfMemoryError):
    """Memory of a device could not be allocated."""


class GroupError(RuntimeError):
    """A member of a process group was lost, did not answer in time, or was interrupted."""


class CryptographyError(Exception):
    """A file is encrypted and no key was given, or the key is wrong."""
