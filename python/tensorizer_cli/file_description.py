"""Files as their own headers describe them, for which torch is not needed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import native
from .output import plural, without_password

if TYPE_CHECKING:
    from tensorizer._types import Head, Name


#: The file that makes a folder a checkpoint of many ranks. `tensorizer.distributed` names it too,
#: but takes long to import.
CHECKPOINT = "checkpoint.json"
_File = TypeVar("_File", bound="FileDescription")


class FileDescription:
    """The description of an open file and its tensors.

    Args:
        shown: Its path or address.
        reader: The reader of the file.
        heads: The servers' headers of its files, if they were requested.

    """

    def __init__(self, shown: str, reader: Any, heads: Sequence[Head] = ()) -> None:
        self.shown = without_password(shown)
        self.reader = reader
        #: The reader of the file, or of the first of several; None if there are none.
        self.first = reader
        self.heads = list(heads)
        self.kinds: Sequence[int] = reader.kinds()
        numbers = range(len(self.kinds))
        self.names: list[Name] = reader.names(numbers)
        #: The dtype of each tensor, without ``torch.``, and its shape.
        self.types: list[tuple[str, tuple[int, ...]]] = reader.describe_all(numbers)
        self.memory_lens: list[int] = reader.memory_lens(numbers)
        self.data_lens: list[int] = reader.data_lens()
        self.total: int = sum(self.data_lens)
        #: Bytes of the largest tensor.
        self.largest: int = max(self.data_lens, default=0)
        #: The numbers of tensors by name, if these are not the names in the file.
        self._numbers: dict[Name, int] | None = None
        #: The names of objects that are no tensors.
        self.left_out: list[str] = []
        #: Descriptions of the tensors of a checkpoint of ``torch.save`` that no name reaches.
        self.unreached: list[str] = []

    def __enter__(self: _File) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()

    def __len__(self) -> int:
        return len(self.names)

    def find(self, name: Name) -> int | None:
        """Return the number of a tensor; None if there is none of this name."""
        if self._numbers is not None:
            return self._numbers.get(name)
        found: int | None = self.reader.find(name)
        return found

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The metadata of the file, without the number of bytes that an index states.

        Raises:
            FormatError: They are damaged.

        """
        found = dict(self.reader.metadata or ())
        if self.reader.files() != [self.reader.uri]:
            found.pop("total_size", None)
        return found


def open_without_torch(file: str, with_heads: bool) -> FileDescription | None:
    """Open a file without torch; None if it is needed."""
    core = native.module()
    path = core.local_path(file)
    if path is None:
        needs_torch = file.endswith("/")
    else:
        # Missing files are an error later. Others than these can be read only once.
        about = status(path)
        is_plain = about is None or stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)
        needs_torch = not is_plain or status(f"{path}/{CHECKPOINT}") is not None
    if needs_torch:
        return None
    has_heads = with_heads and path is None
    options = {"model": True} if path is None else {"path": True}
    with contextlib.closing(core.open(file if path is None else path, options)) as source:
        reader = core.Reader(source, keep_heads=has_heads)
    if reader.format == "torch":
        reader.close()
        return None
    return FileDescription(file, reader, reader.heads() if has_heads else ())


def refuse_missing(options: argparse.Namespace) -> None:
    """Refuse missing files before torch is imported.

    Raises:
        FileNotFoundError: A file is missing; the error names the first.

    """
    for name in ("file", "other"):
        given = getattr(options, name, None)
        path = None if given is None else native.module().local_path(given)
        if path is not None and not os.path.lexists(path):
            native.module().open(path, {"path": True}).close()


def status(path: str) -> os.stat_result | None:
    """Return the status of a path; None if it is missing or cannot be looked at."""
    try:
        return Path(path).stat()
    except (OSError, ValueError):
        return None


def text(name: Name) -> str:
    """Return a name as readable text."""
    return name if isinstance(name, str) else json.dumps(name)


def size(count: float) -> str:
    """Return a number of bytes as readable text."""
    if count < 1000:
        return plural(int(count), "byte")
    return str(native.module().convert_bytes(count))
