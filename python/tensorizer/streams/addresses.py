"""What callers give as a file may be the address of a server."""

from __future__ import annotations

import contextlib
from typing import Any

from .._native import IN_FOLDERS, local_path
from .open import open_stream

#: What names of files end with, and hardly those of folders.
_FILES = (".tensors", ".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt")
#: Schemes of servers that have folders, or keys that look like it.
_FOLDERS = ("http://", "https://", "s3://", "gs://", "az://", "abfs://", "abfss://")


def is_address(file_obj: Any) -> bool:
    """Tell whether something is the address of a server.

    Raises:
        ValueError: It is an address of a kind that is not known.

    """
    return isinstance(file_obj, str) and local_path(file_obj) is None


def open_model(file_obj: Any) -> Any:
    """Open for reading the address of a file, or of a folder of a server with a model in it.

    A folder is one if its address ends with a slash, or if there is nothing under its name.
    Anything else is returned as it is.
    """
    if not is_address(file_obj):
        return file_obj
    named = file_obj.partition("://")[2].strip("/")
    folder = bool(named) and file_obj.startswith(_FOLDERS) and "?" not in file_obj
    folder = folder and not named.endswith(_FILES)
    try:
        if not (folder and file_obj.endswith("/")):
            return open_stream(file_obj)
        missing: OSError = FileNotFoundError(
            f"expected one of {', '.join(IN_FOLDERS)} in `{file_obj}`"
        )
    except (FileNotFoundError, PermissionError) as error:
        if not folder:
            raise
        missing = error
    for name in IN_FOLDERS:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            return open_stream(f"{file_obj.rstrip('/')}/{name}")
    raise missing


def open_address(file_obj: Any, mode: str = "rb") -> Any:
    """Open what is the address of a server; return anything else as it is."""
    if is_address(file_obj):
        return open_stream(file_obj, mode)
    return file_obj
