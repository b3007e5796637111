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
from .save_lock import shortened_name


def is_path(file: Any) -> bool:
    """Tell whether torch treats a file as a path."""
    return isinstance(file, (str, os.PathLike))


def path_of(file: Any) -> str | None:
    """Return the path or the ``name`` of what torch reads or writes; None if it has none."""
    name = file if is_path(file) else getattr(file, "name", None)
    return os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else None


def without_link(file: Any) -> Any:
    """Return the path of the file that a link names; anything else as it is."""
    return os.path.realpath(file) if is_path(file) and Path(file).is_symlink() else file


def local_file(file: Any) -> Path | None:
    """Return the resolved path of a storage file; None for an address or a file object."""
    if not isinstance(file, str) or is_address(file):
        return None
    return Path(os.path.realpath(local_path(file) or file))


class FileIdentity:
    """The identity of the file at a path, to be compared later; an open file counts as no path."""

    def __init__(self, path: Any) -> None:
        self._path = Path(os.fsdecode(path)) if is_path(path) else None
        self._original = self._current()

    def _current(self) -> tuple[int, int] | None:
        try:
            found = None if self._path is None else self._path.stat()
        except OSError:
            return None
        return None if found is None else (found.st_dev, found.st_ino)

    def was_replaced(self) -> bool:
        """Tell whether the path names another file by now; False if it names none."""
        return self._current() not in (None, self._original)

    def is_unchanged(self) -> bool:
        """Tell whether the path still names the same file; False if there was none."""
        return self._original is not None and self._current() == self._original


class StorageFile:
    """The storage file of one save."""

    def __init__(self, file: Any, options: dict[str, Any], target: Any) -> None:
        # torch's own files have a CRC-32, too.
        options = {name: value for name, value in options.items() if name != "compress_tensors"}
        self._file = FileWriter(file, room_for_more=False, **{"hashes": "crc32", **options})
        self._path = local_file(file)
        self._target = target
        self._pair = ""
        self._previous: Path | None = None
        #: The files at the path just before and just after ours is moved there.
        self._identity_before: FileIdentity | None = None
        self._identity_after: FileIdentity | None = None

    def write(self, tensors: list[torch.Tensor]) -> str:
        """Write all storages, and return the file's identity; it is not visible at its path yet."""
        self._file.set_pair_id(None)
        self._file.write_leaves(*named_leaves(tensors))
        identity = self._file.native.pair_id
        assert identity is not None
        self._pair = identity.hex()
        return self._pair

    def publish(self) -> None:
        """Move the file to its path, and keep the one that it replaces under a hidden name."""
        self._keep_previous()
        self._identity_before = FileIdentity(self._path)
        self._file.close()
        self._identity_after = FileIdentity(self._path)

    def _keep_previous(self) -> None:
        if self._path is None or not self._path.is_file():
            return
        owner, stamp = _owner(self._path, self._target), _stamp(self._target)
        rest = f"{owner}.{stamp}.{secrets.token_hex(4)}.before"
        # Set before the hidden name exists, so that an interrupted save puts the file back.
        self._previous = self._path.with_name(f".{shortened_name(self._path)}.{rest}")
        try:
            self._previous.hardlink_to(self._path)
        except OSError:
            # The file system has no hard links: for a moment the hidden name is the only one.
            self._path.rename(self._previous)
        # Without this sync, the new file's name could reach the disk before the hidden one.
        sync_folder(self._path.parent)

    def restore_previous(self) -> None:
        """Put the previous file back, unless another save has put its own file there."""
        self._file.abandon()
        if self._path is None:
            return
        ours = self._is_ours(self._path)
        if self._previous is None:
            if ours:
                self._path.unlink(missing_ok=True)
        elif ours or not self._path.exists():
            with contextlib.suppress(FileNotFoundError):
                self._previous.replace(self._path)
        elif self._previous.exists() and self._previous.samefile(self._path):
            self._previous.unlink()
        # Otherwise the pickle may need the hidden file, until a save succeeds.

    def _is_ours(self, path: Path) -> bool:
        if self._identity_after is not None:
            return self._identity_after.is_unchanged()
        # The file may be in place although ``close()`` failed afterwards.
        if self._identity_before is not None and self._identity_before.was_replaced():
            with contextlib.suppress(OSError, FormatError):
                return _pair_of(path) == self._pair
        return False

    def discard_previous(self) -> None:
        """Remove the previous file; it can no longer be put back."""
        if self._previous is not None:
            # Both files are in place; a hidden file that cannot be removed is left to the next
            # save.
            with contextlib.suppress(OSError):
                self._previous.unlink()
            self._previous = None


def storage_file_of_pair(target: Any, pair: str) -> str | None:
    """Return the file beside a pickle, or beside the file that a link to it names, of a pair.

    Copies and links of a pickle have no file of their own name.
    """
    names = dict.fromkeys([path_of(target), path_of(without_link(target))])
    for folder in dict.fromkeys(Path(name).parent for name in names if name is not None):
        for path in sorted(folder.glob("*.tensors")):
            with contextlib.suppress(OSError, FormatError):
                if _pair_of(path) == pair:
                    return str(path)
    return None


def retained_storage_file(target: Any, file: Any, pair: str | None) -> str | None:
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
    for hidden, *owner_and_stamp in _kept_files(path):
        if pair is None and (stamp == _NO_STAMP or owner_and_stamp != [owner, stamp]):
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


def remove_leftovers(target: Any, file: Any) -> None:
    """Remove storage files kept by killed saves, once both files of the object are in place.

    Those of other objects stay. To be called only while the save lock is held: then no other save
    can be running.
    """
    path = local_file(file)
    with contextlib.suppress(OSError):
        if path is not None:
            owner = _owner(path, target)
            for hidden, found_owner, _ in _kept_files(path):
                if found_owner == owner:
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


def _kept_files(path: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the hidden files that were kept for a path, each with its owner and stamp."""
    name = re.escape(shortened_name(path))
    pattern = rf"\.{name}\.([0-9a-f]{{8}})\.([0-9a-f-]+)\.[0-9a-f]{{8}}\.before"
    with contextlib.suppress(OSError):
        for hidden in sorted(path.parent.iterdir()):
            match = re.fullmatch(pattern, hidden.name)
            if match is not None and hidden.is_file() and not hidden.is_symlink():
                yield hidden, match[1], match[2]


def _pair_of(path: Path) -> str | None:
    """Return the identity that a storage file states; None if it states none."""
    with contextlib.closing(native_open(str(path), {"path": True})) as source:
        reader = Reader(source)
    with contextlib.closing(reader):
        return None if reader.pair_id is None else reader.pair_id.hex()
