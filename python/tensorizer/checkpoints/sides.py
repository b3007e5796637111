"""The file that holds the storages of a saved object, and the previous one while it is replaced.

The pickle and its storage file are renamed into place one after the other. Until both are in place,
the previous storage file is kept as ``.<file>.<owner>.<stamp>.<random>.before``: the owner is a
hash of the names of both files, and the stamp is the version of the pickle at that time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .._errors import FormatError
from .._native import Reader, local_path, open as native_open
from ..file.file_writer import FileWriter
from ..file.nesting import named_leaves
from ..streams.addresses import is_address
from ..streams.syncing import sync_folder
from .turns import lock_of, shown


def is_path(file: Any) -> bool:
    """Tell whether torch treats a file as a path."""
    return isinstance(file, (str, os.PathLike))


def path_of(file: Any) -> str | None:
    """Return the path or the ``name`` of what torch reads or writes; None if it has none."""
    name = file if is_path(file) else getattr(file, "name", None)
    return os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else None


def local_file(file: Any) -> Path | None:
    """Return the resolved path of a storage file; None for an address or a file object."""
    if not isinstance(file, str) or is_address(file):
        return None
    return Path(os.path.realpath(local_path(file) or file))


class Named:
    """The identity of the file at a path, to be compared later; the path may be None."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._before = self._identity()

    @classmethod
    def by(cls, target: Any) -> Named:
        """Return an instance for what torch reads or writes; an open file counts as no path."""
        return cls(Path(os.fsdecode(target)) if is_path(target) else None)

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = None if self._path is None else self._path.stat()
        except OSError:
            return None
        return None if found is None else (found.st_dev, found.st_ino)

    def is_another(self) -> bool:
        """Tell whether the path names another file by now; False if it names none."""
        return self._identity() not in (None, self._before)

    def is_the_same(self) -> bool:
        """Tell whether the path still names the same file; False if there was none."""
        return self._before is not None and self._identity() == self._before


class Side:
    """The storage file of one save."""

    def __init__(self, file: Any, options: dict[str, Any], target: Any) -> None:
        # torch's own files have a CRC-32, too.
        options = {name: value for name, value in options.items() if name != "compress_tensors"}
        self._file = FileWriter(file, **{"hashes": "crc32", **options})
        self._path = local_file(file)
        self._target = target
        self._identity = ""
        self._before: Path | None = None
        #: The files at the path just before and just after ours is moved there.
        self._kept: Named | None = None
        self._published: Named | None = None

    def write(self, tensors: list[torch.Tensor]) -> str:
        """Write all storages, and return the file's identity; it is not visible at its path yet."""
        self._file.set_pair(None)
        self._file.write_leaves(*named_leaves(tensors))
        identity = self._file.pair_id
        assert identity is not None
        self._identity = identity.hex()
        return self._identity

    def publish(self) -> None:
        """Move the file to its path, and keep the one that it replaces under a hidden name."""
        self._keep()
        self._kept = Named(self._path)
        self._file.close()
        self._published = Named(self._path)

    def _keep(self) -> None:
        if self._path is None or not self._path.is_file():
            return
        owner, stamp = _owner(self._path, self._target), _stamp(self._target)
        rest = f"{owner}.{stamp}.{secrets.token_hex(4)}.before"
        # Set before the hidden name exists, so that an interrupted save puts the file back.
        self._before = self._path.with_name(f".{shown(self._path)}.{rest}")
        try:
            self._before.hardlink_to(self._path)
        except OSError:
            # The file system has no hard links: for a moment the hidden name is the only one.
            self._path.rename(self._before)
        # Otherwise the new file's name could reach the disk before this one.
        sync_folder(self._path.parent)

    def withdraw(self) -> None:
        """Put the previous file back, unless another saver has put its own file there."""
        self._file.abandon()
        if self._path is None:
            return
        ours = self._is_ours(self._path)
        if self._before is None:
            if ours:
                self._path.unlink(missing_ok=True)
        elif ours or not self._path.exists():
            with contextlib.suppress(FileNotFoundError):
                self._before.replace(self._path)
        elif self._before.exists() and self._before.samefile(self._path):
            self._before.unlink()
        # Otherwise the pickle may need the hidden file, until a save succeeds.

    def _is_ours(self, path: Path) -> bool:
        if self._published is not None:
            return self._published.is_the_same()
        # The file may be in place although ``close()`` failed afterwards.
        if self._kept is not None and self._kept.is_another():
            with contextlib.suppress(OSError, FormatError):
                return _pair_of(path) == self._identity
        return False

    def forget(self) -> None:
        """Remove the previous file; it can no longer be put back."""
        if self._before is not None:
            # Both files are in place; a hidden file that cannot be removed is left to the next
            # save.
            with contextlib.suppress(OSError):
                self._before.unlink()
            self._before = None


def kept_half(target: Any, file: Any, pair: str | None) -> str | None:
    """Return the hidden storage file of a pickle, kept by a killed or running save; else None.

    Args:
        target: The pickle that torch loads.
        file: The file that should hold its storages, and does not.
        pair: The identity that the pickle states. None for a pickle of the old package, which
            must not have changed since the storages were kept for it.

    """
    path = local_file(file)
    if path is None:
        return None
    owner, stamp = _owner(path, target), _stamp(target)
    fitting = []
    for hidden, *whose in _kept(path):
        if pair is None and (stamp == _NO_STAMP or whose != [owner, stamp]):
            continue
        # A hidden link to the file at the path itself is no alternative.
        with contextlib.suppress(OSError):
            if hidden.samefile(path):
                continue
        with contextlib.suppress(OSError, FormatError):
            if _pair_of(hidden) == pair:
                fitting.append(hidden)
    if not fitting or (pair is None and not all(one.samefile(fitting[0]) for one in fitting)):
        return None
    return str(fitting[0])


def left_behind(target: Any, file: Any) -> list[Path]:
    """Return hidden files of running or killed saves of this object, not of other objects."""
    side = local_file(file)
    if side is None:
        return []
    owner = _owner(side, target)
    hidden = [hidden for hidden, whose, _ in _kept(side) if whose == owner]
    return [*hidden, lock_of(side)] if lock_of(side).exists() else hidden


def clean_up(target: Any, file: Any) -> None:
    """Remove storage files kept by killed saves, once both files of the object are in place.

    To be called only while the save lock is held: then no other save can be running.
    """
    side = local_file(file)
    with contextlib.suppress(OSError):
        if side is not None:
            owner = _owner(side, target)
            for hidden, whose, _ in _kept(side):
                if whose == owner:
                    hidden.unlink(missing_ok=True)


_NO_STAMP = "0"


def _stamp(target: Any) -> str:
    """Return the version of a pickle, from its modification time and size; "0" if there is none."""
    name = path_of(target)
    with contextlib.suppress(OSError, ValueError):
        if name is not None:
            found = Path(name).stat()
            return f"{found.st_mtime_ns:x}-{found.st_size:x}"
    return _NO_STAMP


def _owner(path: Path, target: Any) -> str:
    names = f"{path.name}\0{Path(path_of(target) or '').name}"
    return hashlib.blake2b(os.fsencode(names), digest_size=4).hexdigest()


def _matching(folder: Path, pattern: str) -> Iterator[tuple[Path, re.Match[str]]]:
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:
        return
    for name in sorted(found):
        match = re.fullmatch(pattern, name)
        if match is not None:
            yield folder / name, match


def _kept(path: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the hidden files that were kept for a path, each with its owner and stamp."""
    pattern = rf"\.{re.escape(shown(path))}\.([0-9a-f]{{8}})\.([0-9a-f-]+)\.[0-9a-f]{{8}}\.before"
    for hidden, match in _matching(path.parent, pattern):
        yield hidden, match[1], match[2]


def _pair_of(path: Path) -> str | None:
    """Return the identity that a storage file states; None if it states none."""
    with contextlib.closing(native_open(str(path), {"path": True})) as source:
        reader = Reader(source)
    try:
        return None if reader.pair_id is None else reader.pair_id.hex()
    finally:
        reader.close()
