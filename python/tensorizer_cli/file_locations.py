"""The places of a model's files, what their servers report of them, and their cached bytes."""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import native
from .file_description import FileDescription, is_address, size
from .output import plural, without_password


@dataclass(frozen=True)
class FileLocation:
    """A file of a model.

    Attributes:
        name: Its path or address, without secrets.
        is_local: True if it is a file of this machine.
        tensors: The number of tensors in it.
        length: Its size in bytes, if that is known.
        etag: The ``ETag`` from its server.
        modified: The time of its last change, as reported by its server.
        cached: The number of its bytes in the folder that ``TENSORIZER_CACHE`` names; None if that
            names none, or the file is not on a server whose files are cached.

    """

    name: str
    is_local: bool
    tensors: int
    length: int | None
    etag: str | None = None
    modified: str | None = None
    cached: int | None = None

    def lines(self) -> list[str]:
        """Return the lines about a file that is the only one."""
        if self.is_local:
            what = "a pipe" if self.length is None else "a file of this machine"
        else:
            what = self.name
        lines = [what if self.length is None else f"{what}, {size(self.length)}"]
        said = [f"ETag {self.etag}"] if self.etag else []
        said += [f"changed {self.modified}"] if self.modified else []
        lines += [", ".join(said)] if said else []
        if self.cached is not None:
            lines.append(self.share())
        return lines

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a row about one of several files."""
        length = "" if self.length is None else size(self.length)
        last = [self.etag or "", self.share() if self.cached is not None else ""]
        return self.name, plural(self.tensors, "tensor"), length, "  ".join(filter(None, last))

    def share(self) -> str:
        """Return the share of the file that is in the cache, as text."""
        return f"{(self.cached or 0) / (self.length or 1):.0%} in the cache"

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the file for JSON."""
        return {
            "file": self.name,
            "local": self.is_local,
            "tensors": self.tensors,
            "bytes": self.length,
            "etag": self.etag,
            "modified": self.modified,
            "cached": self.cached,
        }


def file_locations(file: FileDescription) -> list[FileLocation]:
    """Return the places of a model's files, in the order of the model."""
    heads = {uri: (length, etag, modified) for uri, length, etag, modified, *_ in file.heads}
    here = _in_cache()
    counts = Counter(file.reader.file_numbers())
    found: list[FileLocation] = []
    for number, uri in enumerate(file.reader.files()):
        shown, tensors = without_password(uri), counts[number]
        if not is_address(uri):
            found.append(FileLocation(shown, True, tensors, _local_length(uri)))
        elif uri in heads:
            cached = None if here is None else here.get(uri, 0)
            found.append(FileLocation(shown, False, tensors, *heads[uri], cached))
        else:
            found.append(FileLocation(shown, False, tensors, None))
    return found


def _local_length(path: str) -> int | None:
    """Return the size of a local file; None if it is not a regular file, but a pipe, say."""
    try:
        about = Path(path).stat()
    except (OSError, ValueError):
        return None
    return about.st_size if stat.S_ISREG(about.st_mode) else None


def _in_cache() -> dict[str, int] | None:
    """Return the cached bytes of each file; None if there is no cache."""
    if not os.environ.get("TENSORIZER_CACHE"):
        return None
    return {uri: here for uri, _, here, _ in native.module().cache_entries()}
