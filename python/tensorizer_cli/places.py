"""Where the files of a model lie, what their servers say of them, and what of them is kept here."""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import native
from .heads import Heads, is_address, size
from .output import plural, without_password


@dataclass(frozen=True)
class Place:
    """A file.

    Attributes:
        name: Its path or address, as others may see it.
        is_local: Whether it is a file of this machine.
        tensors: How many tensors are in it.
        length: Its size in bytes, if that is known.
        etag: The ``ETag`` of its server.
        modified: When it was changed, as its server says.
        cached: How many of its bytes are in the folder that ``TENSORIZER_CACHE`` names; None if
            that names none, or the file is of no server that files are kept of.

    """

    name: str
    is_local: bool
    tensors: int
    length: int | None
    etag: str | None = None
    modified: str | None = None
    cached: int | None = None

    def lines(self) -> list[str]:
        """Return what is said of the only file."""
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
        """Return what is said of one of several."""
        length = "" if self.length is None else size(self.length)
        last = [self.etag or "", self.share() if self.cached is not None else ""]
        return self.name, plural(self.tensors, "tensor"), length, "  ".join(filter(None, last))

    def share(self) -> str:
        """Return how much of the file is in the cache."""
        return f"{(self.cached or 0) / (self.length or 1):.0%} in the cache"

    def as_json(self) -> dict[str, Any]:
        """Return the same for programs."""
        return {
            "file": self.name,
            "local": self.is_local,
            "tensors": self.tensors,
            "bytes": self.length,
            "etag": self.etag,
            "modified": self.modified,
            "cached": self.cached,
        }


def places(file: Heads) -> list[Place]:
    """Return where the files of a model lie, in the order of the model."""
    heads = {uri: (length, etag, modified) for uri, length, etag, modified, *_ in file.heads}
    here = _in_cache()
    counts = Counter(file.reader.file_numbers())
    found: list[Place] = []
    for number, uri in enumerate(file.reader.files()):
        shown, tensors = without_password(uri), counts[number]
        if not is_address(uri):
            found.append(Place(shown, True, tensors, _local_length(uri)))
        elif uri in heads:
            cached = None if here is None else here.get(uri, 0)
            found.append(Place(shown, False, tensors, *heads[uri], cached))
        else:
            found.append(Place(shown, False, tensors, None))
    return found


def _local_length(path: str) -> int | None:
    """Return the size of a local file; None of what is no file, such as a pipe."""
    try:
        about = Path(path).stat()
    except (OSError, ValueError):
        return None
    return about.st_size if stat.S_ISREG(about.st_mode) else None


def _in_cache() -> dict[str, int] | None:
    """Return how many bytes of each file are kept here; None if none are."""
    if not os.environ.get("TENSORIZER_CACHE"):
        return None
    return {uri: here for uri, _, here, _ in native.module().cache_entries()}
