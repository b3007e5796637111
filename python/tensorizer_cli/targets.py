"""The targets of copies: their paths and addresses, and the standard output."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tensorizer._native import local_path

from . import standard_streams

#: The argument for the standard input or output.
STREAM = "-"
#: Endings that a copy in a folder keeps; an encrypted copy keeps only the first.
_ENDINGS = (".tensors", ".safetensors")


def resolve(options: argparse.Namespace) -> str:
    """Return the path or address of a copy; in a folder, it has the name of the file.

    Raises:
        ValueError: The file has no name to use for it, or the standard output has another use.

    """
    target: str = options.target
    if target == STREAM:
        if options.json or options.verify:
            option = "--json" if options.json else "--verify"
            raise ValueError(f"{option} and a copy to the standard output exclude each other")
        return target
    if not target:
        raise ValueError("expected a path or an address to copy to, found an empty one")
    source_path, target_path = local_path(options.file), local_path(target)
    is_folder = target_path is not None and Path(target_path).is_dir()
    if not target.endswith("/") and not is_folder:
        return target
    # The query of an address is no part of its name.
    source = options.file.partition("?")[0] if source_path is None else source_path
    name = source.rstrip("/").rpartition("/")[2].removesuffix(".index.json")
    if name in ("", ".", "..", "stdin"):
        raise ValueError(f"{target} is a folder, and {options.file} has no name for a file in it")
    endings = _ENDINGS if options.command in ("cp", "decrypt") else _ENDINGS[:1]
    if not name.lower().endswith(endings):
        is_pickled = name.lower().endswith((".bin", ".pt", ".pth"))
        name = f"{Path(name).stem if is_pickled else name}.tensors"
    folder = target if target_path is None else target_path
    # The name of an object may have an empty component.
    found = f"{folder.removesuffix('/')}/{name}"
    both_local = source_path is not None and target_path is not None
    if both_local and Path(found).exists() and Path(found).samefile(source):
        raise ValueError(f"{found} is the file itself: name another target")
    return found


@contextlib.contextmanager
def standard_output() -> Iterator[int]:
    """Yield the descriptor of a file without a name, which is printed at the end.

    The index of a file comes before its tensors, but is known only after them.
    """
    with tempfile.TemporaryFile() as file:
        yield file.fileno()
        file.seek(0)
        standard_streams.copy_to_output(file)
