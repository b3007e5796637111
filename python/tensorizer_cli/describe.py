"""Files that are opened for what they say of themselves."""

from __future__ import annotations

from .file_description import FileDescription, open_without_torch


def open_description(file: str, *, with_heads: bool = False) -> FileDescription:
    """Open a file to describe it.

    torch is imported only for checkpoints of ``torch.save``, whose pickles it reads, for folders of
    distributed checkpoints, and for input that can be read only once.
    """
    found = open_without_torch(file, with_heads)
    if found is None:
        from .checkpoint import open_file

        found = open_file(file, names_only=True, heads=() if with_heads else None)
    return found
