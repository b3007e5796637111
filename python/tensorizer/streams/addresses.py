"""Addresses of servers, as arguments that name a file."""

from __future__ import annotations

import os
from typing import Any

from .._native import local_path
from .open import open_stream


def is_address(file_obj: Any) -> bool:
    """Tell whether an argument is the address of a server.

    Raises:
        ValueError: It is an address of an unknown kind.

    """
    return isinstance(file_obj, str) and local_path(file_obj) is None


def open_address(file_obj: Any, mode: str, **options: Any) -> Any:
    """Open the address of a server with options; return any other argument as it is."""
    if is_address(file_obj):
        return open_stream(file_obj, mode, **options)
    return file_obj


def is_there(file: str | os.PathLike[str], *absent: type[OSError], **options: Any) -> bool:
    """Tell whether a file can be opened; other errors than ``FileNotFoundError`` may mean no, too.

    Servers that may not list a folder answer with ``PermissionError`` for a missing file. The
    options are those of :func:`open_stream`.
    """
    try:
        with open_stream(file, **options):
            return True
    except OSError as error:
        if isinstance(error, (FileNotFoundError, *absent)):
            return False
        raise
