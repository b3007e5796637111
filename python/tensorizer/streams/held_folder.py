"""A local folder that is held open while several files are written into it."""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class HeldPath(os.PathLike[str]):
    """The path of a file in a folder that is held open, and its usual path for messages."""

    path: str
    shown: str

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.shown


class HeldFolder(AbstractContextManager["HeldFolder"]):
    """A folder, a context manager. Files in it stay together when its path changes meanwhile.

    It is held open until the object is closed or freed.

    Args:
        folder: The path, which is created if necessary; empty for the working directory.

    Attributes:
        path: A path of this very folder, whatever its own path means meanwhile.

    """

    #: The mode in which the folder is opened.
    _access = os.O_PATH

    def __init__(self, folder: str) -> None:
        self._prefix = folder if folder.endswith("/") or not folder else f"{folder}/"
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder or ".", self._access | os.O_DIRECTORY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, self._release, self._descriptor, os.getpid())
        open_path = f"/proc/self/fd/{self._descriptor}"
        self.path = open_path if Path(open_path).is_dir() else folder

    @staticmethod
    def _release(descriptor: int, process: int) -> None:
        os.close(descriptor)

    def entry(self, name: str) -> HeldPath:
        """Return the path of a file in the folder."""
        return HeldPath(str(Path(self.path, name)), self._prefix + name)

    def __exit__(self, *_: Any) -> None:
        self._close()
