"""The file that holds the storages of a saved object, and the one before it.

A pickle and its file of storages get their names one after the other. Until both have them, the
storages of before have a hidden name, ``.<file>.<owner>.<stamp>.<random>.before``: the owner is
made from the names of both halves, and the stamp tells which version of the pickle was there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ._errors import FormatError
from ._files import is_address
from ._native import Reader, local_path
from ._serializer import TensorSerializer

#: So many bytes of a name are part of that of a hidden file, which may have 255.
_SHOWN = 150


def is_path(file: Any) -> bool:
    """Tell whether torch takes a file for a path."""
    return isinstance(file, (str, os.PathLike))


def path_of(file: Any) -> str | None:
    """Return the name of what torch reads or writes, None if it has none."""
    name = file if is_path(file) else getattr(file, "name", None)
    return os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else None


def _local(file: Any) -> Path | None:
    """Return where a file of storages is, if it has a path."""
    if not isinstance(file, str) or is_address(file):
        return None
    return Path(os.path.realpath(local_path(file) or file))


class Named:
    """Which file a path names; None names nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._before = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = None if self._path is None else self._path.stat()
        except OSError:
            return None
        return None if found is None else (found.st_dev, found.st_ino)

    def is_another(self) -> bool:
        """Tell whether it names another file by now."""
        now = self._identity()
        return now is not None and now != self._before


class Side:
    """The file of storages, being written."""

    def __init__(self, file: Any, options: dict[str, Any], target: Any) -> None:
        # torch's own files have a CRC-32, too.
        self._serializer = TensorSerializer(file, **{"hashes": "crc32", **options})
        self._path = _local(file)
        self._target = target
        self._before: Path | None = None
        self._moved = False
        self._published = False
        self._claim: int | None = None

    def write(self, tensors: list[torch.Tensor]) -> str:
        """Write everything, and return the file's identity. It cannot be seen yet."""
        writer = self._serializer._writer
        assert writer is not None
        writer.set_pair(None)
        self._serializer.write_state_dict(tensors)
        identity = writer.pair_id
        assert identity is not None
        return identity.hex()

    def publish(self) -> None:
        """Make the file visible, and keep the one that it replaces."""
        self._keep()
        named = Named(self._path)
        try:
            self._serializer.close()
        except BaseException:
            # What has the name is published, whatever failed afterwards.
            self._published = named.is_another()
            raise
        self._published = True

    def _keep(self) -> None:
        if self._path is None or not self._path.is_file():
            return
        owner, stamp = _owner(self._path, self._target), _stamp(self._target)
        rest = f"{owner}.{stamp}.{secrets.token_hex(4)}.before"
        before = self._path.with_name(f".{_shown(self._path)}.{rest}")
        try:
            before.hardlink_to(self._path)
        except OSError:
            # File systems without links: then the hidden name is its only one for a moment.
            self._path.rename(before)
            self._moved = True
        self._before = before
        self._claim = _lock(before, fcntl.LOCK_SH)

    def withdraw(self) -> None:
        """Put back what was there before."""
        if not self._published:
            self._serializer._abandon()
        if self._before is not None and self._path is not None:
            if self._published or self._moved:
                self._before.replace(self._path)
        elif self._published and self._path is not None and self._path.is_file():
            self._path.unlink()
        self.forget()

    def forget(self) -> None:
        """Give up the way back."""
        claim, self._claim = self._claim, None
        if claim is not None:
            os.close(claim)
        if self._before is not None:
            self._before.unlink(missing_ok=True)
            self._before = None


def kept_half(target: Any, file: Any, pair: str | None) -> str | None:
    """Return the hidden file that holds the storages of a pickle, if a save was killed.

    Args:
        target: What torch loads.
        file: What should hold its storages, and does not.
        pair: The identity that the pickle states. None for one of the old package: then it must
            not have changed since the storages were kept for it.

    """
    path = _local(file)
    if path is None:
        return None
    owner, stamp = _owner(path, target), _stamp(target)
    fitting = []
    for hidden, *whose in _kept(path):
        if pair is None and (stamp == _NO_STAMP or whose != [owner, stamp]):
            continue
        # What has its name still is no other file.
        with contextlib.suppress(OSError):
            if hidden.samefile(path):
                continue
        with contextlib.suppress(OSError, FormatError):
            reader = Reader.from_path(str(hidden))
            try:
                found = reader.pair_id
            finally:
                reader.close()
            if (None if found is None else found.hex()) == pair:
                fitting.append(hidden)
    if not fitting or (pair is None and not all(one.samefile(fitting[0]) for one in fitting)):
        return None
    return str(fitting[0])


def clean_up(target: Any, file: Any) -> None:
    """Remove storages that saves which were killed have kept, once both halves have their names.

    What belongs to another object stays, and so does what a running process has locked.
    """
    side = _local(file)
    with contextlib.suppress(OSError):
        if side is not None:
            owner = _owner(side, target)
            for hidden, whose, _ in _kept(side):
                if whose == owner:
                    _remove(hidden)


_NO_STAMP = "0"


def _stamp(target: Any) -> str:
    """Tell which version of a pickle there is."""
    name = path_of(target)
    with contextlib.suppress(OSError, ValueError):
        if name is not None:
            found = Path(name).stat()
            return f"{found.st_mtime_ns:x}-{found.st_size:x}"
    return _NO_STAMP


def _owner(path: Path, target: Any) -> str:
    names = f"{path.name}\0{Path(path_of(target) or '').name}"
    return hashlib.blake2b(os.fsencode(names), digest_size=4).hexdigest()


def _shown(path: Path) -> str:
    shown = path.name
    while len(os.fsencode(shown)) > _SHOWN:
        shown = shown[:-1]
    return shown


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
    """Yield the hidden names of files that were called so, each with its owner and stamp."""
    pattern = rf"\.{re.escape(_shown(path))}\.([0-9a-f]{{8}})\.([0-9a-f-]+)\.[0-9a-f]{{8}}\.before"
    for hidden, match in _matching(path.parent, pattern):
        yield hidden, match[1], match[2]


def _lock(path: Path, kind: int) -> int | None:
    """Lock a file that nobody else has locked; return the descriptor that holds the lock."""
    with contextlib.suppress(OSError):
        # Locks of network file systems need one for writing.
        number = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(number, kind | fcntl.LOCK_NB)
        except BaseException:
            os.close(number)
            raise
        return number
    return None


def _remove(hidden: Path) -> None:
    number = _lock(hidden, fcntl.LOCK_EX)
    if number is not None:
        try:
            hidden.unlink(missing_ok=True)
        finally:
            os.close(number)
