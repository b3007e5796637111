"""A local folder that is held open while several files are written into it."""

from __future__ import annotations

import os
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


class HeldFolder:
    """A folder, a context manager. Files in it stay together when its path changes meanwhile.

    Args:
        folder: The path, which is created if necessary; empty for the working directory.

    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def entry(self, name: str) -> HeldPath:
        """Return the path of a file in the folder."""
        return HeldPath(
            str(Path(path_of(self._descriptor) or self._folder, name)), self._folder + name
        )

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self._descriptor)


def path_of(descriptor: int) -> str | None:
    """Return a path of an open folder that does not depend on its name; None without /proc."""
    path = f"/proc/self/fd/{descriptor}"
    return path if os.path.isdir(path) else None  # noqa: PTH112  # cheaper
