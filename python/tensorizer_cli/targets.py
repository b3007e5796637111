"""The targets of copies: their paths and addresses, and the standard output."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tensorizer.streams.addresses import is_address

from . import standard

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
    if not target.endswith("/") and (is_address(target) or not Path(target).is_dir()):
        return target
    name = options.file.partition("?")[0].rstrip("/").rpartition("/")[2]
    name = name.removesuffix(".index.json")
    if name in ("", ".", "..", "stdin"):
        raise ValueError(f"{target} is a folder, and {options.file} has no name for a file in it")
    endings = _ENDINGS if options.command in ("cp", "decrypt") else _ENDINGS[:1]
    if not name.endswith(endings):
        is_pickled = name.endswith((".bin", ".pt", ".pth"))
        name = f"{Path(name).stem if is_pickled else name}.tensors"
    found = f"{target.rstrip('/')}/{name}" if target.strip("/") else f"/{name}"
    if Path(found).exists() and Path(found).samefile(options.file):
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
        standard.copy(file)
