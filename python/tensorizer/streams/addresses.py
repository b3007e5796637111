"""Addresses of servers, as arguments that name a file."""

from __future__ import annotations

from typing import Any

from .._native import local_path
from .open import open_stream


def is_address(file_obj: Any) -> bool:
    """Tell whether an argument is the address of a server.

    Raises:
        ValueError: It is an address of an unknown kind.

    """
    return isinstance(file_obj, str) and local_path(file_obj) is None


def open_address(file_obj: Any, mode: str = "rb") -> Any:
    """Open the address of a server; return any other argument as it is."""
    if is_address(file_obj):
        return open_stream(file_obj, mode)
    return file_obj


def is_there(address: str) -> bool:
    """Tell whether there is a file; servers that may not list a folder refuse access instead."""
    try:
        with open_stream(address):
            return True
    except (FileNotFoundError, PermissionError):
        return False
