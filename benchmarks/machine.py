"""The machine of a measurement: its memory, versions of packages, and the commit."""

from __future__ import annotations

import importlib.metadata
import mmap
import subprocess
from pathlib import Path


def fresh(size: int) -> mmap.mmap:
    """Return new memory, advised to be backed by huge pages."""
    memory = mmap.mmap(-1, size + (4 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def have_memory(size: int) -> None:
    """Allocate, touch and free memory for a measurement of so many bytes, so that it need not wait.

    It is 2.5 times as much: for the tensors, for pages of files, and for buffers.
    A virtual machine returns memory to its host when it has been free for two seconds, and waits
    for it at the next touch: ten times as long as a load takes, in some rounds and not in others.
    """
    size = size * 5 // 2
    memory = fresh(size)
    for offset in range(0, size, 4096):
        memory[offset] = 1
    memory.close()


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "none"
    return found.stdout.strip() or "none"
