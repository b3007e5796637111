"""Files as far as they say themselves what they hold: for that, torch is not needed."""

from __future__ import annotations

import argparse
import json
import os
import stat
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import native
from .output import plural, without_password

if TYPE_CHECKING:
    from tensorizer._native import Reader
    from tensorizer._types import Head, Name


class Heads:
    """What an open file says of its tensors, and of itself.

    Args:
        shown: Its path or address.
        reader: What reads it.
        heads: What servers say of its files, where that is asked for.

    """

    def __init__(self, shown: str, reader: Any, heads: Sequence[Head] = ()) -> None:
        self.shown = without_password(shown)
        self.reader = reader
        self.heads = list(heads)
        self.kinds: Sequence[int] = reader.kinds()
        self.memory_lens: list[int] = reader.memory_lens()
        self.data_lens: list[int] = reader.data_lens()
        self.total: int = sum(self.data_lens)
        #: What is no tensor.
        self.left_out: list[str] = []

    @property
    def first(self) -> Reader | None:
        """What reads the file, or the first of those that are read together."""
        found: Reader = self.reader
        return found

    def __enter__(self) -> Heads:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()

    def __len__(self) -> int:
        return len(self.reader)

    @cached_property
    def metadata(self) -> dict[str, str]:
        """What the file says beside its tensors, without the bytes that an index counts.

        Raises:
            FormatError: They are damaged.

        """
        found = dict(self.reader.metadata or ())
        if self.reader.files() != [self.reader.uri]:
            found.pop("total_size", None)
        return found


def open_heads(file: str, *, with_heads: bool = False) -> Heads:
    """Open a file for what it says of itself.

    torch is imported for checkpoints of ``torch.save``, whose pickles it reads, for folders of
    distributed checkpoints, and for what can be read only once.
    """
    found = _opened(file, with_heads)
    if found is None:
        from .checkpoint import open_file

        found = open_file(file, names_only=True, heads=() if with_heads else None)
    return found


def _opened(file: str, with_heads: bool) -> Heads | None:
    """Open a file without torch; None if it is needed."""
    core = native.module()
    path = core.local_path(file)
    if path is None and file.endswith("/"):
        return None
    if path is not None and not _is_readable_twice(path):
        return None
    options = {"model": True} if path is None else {"path": True}
    source = core.open(file if path is None else path, options)
    try:
        reader = core.Reader(source, keep_heads=with_heads and path is None)
    finally:
        source.close()
    if reader.format == "torch":
        reader.close()
        return None
    return Heads(file, reader, reader.heads() if with_heads and path is None else ())


def refuse_missing(options: argparse.Namespace) -> None:
    """Refuse files that are not there before torch is imported.

    Raises:
        FileNotFoundError: It names the first.

    """
    for name in () if options.command == "keygen" else ("file", "other"):
        given = getattr(options, name, None)
        path = None if given is None else native.module().local_path(given)
        if path is not None and not os.path.lexists(path):
            native.module().open(path, {"path": True}).close()


def _is_readable_twice(path: str) -> bool:
    """Tell whether something is a file or a model's folder, or is not there, which is an error."""
    try:
        about = Path(path).stat()
    except (OSError, ValueError):
        return True
    if stat.S_ISDIR(about.st_mode):
        return not any((Path(path) / name).exists() for name in ("checkpoint.json", ".metadata"))
    return stat.S_ISREG(about.st_mode)


def is_address(file: str) -> bool:
    """Tell whether a text is the address of a server, and no path."""
    return native.module().local_path(os.fspath(file)) is None


def text(name: Name) -> str:
    """Return a name as people read it."""
    return name if isinstance(name, str) else json.dumps(list(name))


def plain(name: Name) -> str | list[str | int]:
    """Return a name as JSON has it."""
    return name if isinstance(name, str) else list(name)


def size(count: float) -> str:
    """Return a number of bytes for people."""
    if count < 1000:
        return plural(int(count), "byte")
    shown: str = native.module().convert_bytes(count)
    return shown
