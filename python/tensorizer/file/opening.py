"""What callers give as a file, turned into what the native module opens."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._native import Reader, local_path, open as native_open
from .._types import OpenOptions
from ..streams.addresses import is_address
from ..streams.atomic import AtomicRandom
from . import hints

if TYPE_CHECKING:
    from .._native import Source


#: Characters; Linux takes paths of 4,095 bytes (PATH_MAX with its final zero).
_LONGEST_PATH = 4095


@dataclass
class LocalPath:
    """A path of the local file system."""

    path: str


@dataclass
class Descriptor:
    """An open file of the operating system, from position ``base`` on."""

    number: int
    uri: str
    base: int


@dataclass
class PythonFile:
    """A Python object. Its size is None where it cannot seek."""

    file: Any
    uri: str
    base: int
    size: int | None


@dataclass
class Memory:
    """Bytes of a file, for :class:`TensorFile` alone."""

    data: bytes
    uri: str


@dataclass
class Remote:
    """A file of a server, from position ``base`` on."""

    source: Source
    uri: str
    base: int


def classify(file_obj: Any) -> LocalPath | Descriptor | PythonFile | Remote:
    """Say how to open a path, ``os.PathLike``, descriptor or binary file object.

    Raises:
        TypeError: It is none of these.
        ValueError: It is a text file, or can be no path.

    """
    native = getattr(file_obj, "_native_source", None)
    source = native() if native is not None else None
    if source is not None and (source.size is not None or file_obj.tell() == 0):
        return Remote(source, file_obj.name, file_obj.tell())
    if isinstance(file_obj, str):
        # Addresses of servers were opened before.
        return LocalPath(_checked(local_path(file_obj) or file_obj, file_obj))
    if isinstance(file_obj, (bytes, os.PathLike)):
        return LocalPath(_checked(os.fsdecode(file_obj), file_obj))
    if isinstance(file_obj, int) and not isinstance(file_obj, bool):
        return Descriptor(file_obj, f"<descriptor {file_obj}>", 0)
    if _is_text(file_obj):
        raise ValueError(f"expected a binary file, found a text file: {file_obj!r}")
    if not hasattr(file_obj, "read") and not hasattr(file_obj, "write"):
        raise TypeError(
            "expected a path, a file descriptor or a binary file object, "
            f"found {type(file_obj).__name__}{hints.of_source(file_obj)}"
        )
    uri = str(getattr(file_obj, "name", None) or f"<{type(file_obj).__name__}>")
    if not is_seekable(file_obj):
        return PythonFile(file_obj, uri, _position(file_obj), None)
    base = file_obj.tell()
    number = _descriptor(file_obj)
    if number is not None:
        return Descriptor(number, uri, base)
    size = file_obj.seek(0, os.SEEK_END)
    size = file_obj.tell() if size is None else size
    file_obj.seek(base)
    return PythonFile(file_obj, uri, base, size)


def _checked(path: str, given: Any) -> str:
    """Refuse what can be no path, without repeating all of it: the content of a file, say."""
    if len(path) <= _LONGEST_PATH and "\0" not in path:
        return path
    if isinstance(given, bytes):
        raise ValueError(
            f"expected a path, found {len(given)} bytes that begin with {given[:20]!r}: pass "
            "io.BytesIO(data) for a file in memory"
        )
    raise ValueError(f"expected a path, found {len(path)} characters: {path[:40]!r}...")


def _is_text(file_obj: Any) -> bool:
    if isinstance(file_obj, (io.RawIOBase, io.BufferedIOBase)):
        # Binary, whatever their mode: that of a member of a zip file is "r".
        return False
    # Files that were opened by number have a number for a mode.
    mode = getattr(file_obj, "mode", "b")
    return isinstance(file_obj, io.TextIOBase) or (isinstance(mode, str) and "b" not in mode)


def _position(file_obj: Any) -> int:
    """Return how many bytes were read from a stream before, where it knows."""
    try:
        return int(file_obj.tell())
    except (AttributeError, OSError):
        return 0


def is_seekable(file_obj: Any) -> bool:
    """Tell whether a file object can be read or written at positions."""
    if not hasattr(file_obj, "seek"):
        return False
    try:
        return bool(file_obj.seekable()) if hasattr(file_obj, "seekable") else True
    except OSError:
        return False


def _descriptor(file_obj: Any) -> int | None:
    """Return the descriptor behind a plain file, and None for anything that may transform bytes.

    ``gzip.GzipFile``, for one, has a ``fileno()`` whose bytes are not those that it reads.
    """
    if isinstance(file_obj, tempfile._TemporaryFileWrapper):
        file_obj = file_obj.file
    plain = (io.BufferedReader, io.BufferedRandom, io.BufferedWriter, AtomicRandom)
    if type(file_obj) in plain:
        if file_obj.writable():
            file_obj.flush()
        file_obj = file_obj.raw
    return int(file_obj.fileno()) if type(file_obj) is io.FileIO else None


def is_local(opened: Any) -> bool:
    """Tell whether what was opened is a file of this machine."""
    elsewhere = is_address(opened) or isinstance(opened, Memory)
    target = None if elsewhere else classify(opened)
    return isinstance(target, (LocalPath, Descriptor))


def open_reader(file_obj: Any) -> Reader:
    """Open a descriptor, stream or object, or bytes in memory."""
    if isinstance(file_obj, Memory):
        return _read(file_obj.data, {"uri": file_obj.uri})
    target = classify(file_obj)
    if isinstance(target, LocalPath):
        return _read(target.path, {"path": True})
    if isinstance(target, Remote):
        return Reader(target.source, target.base)
    if not isinstance(file_obj, int):
        readable = getattr(file_obj, "readable", None)
        if not hasattr(file_obj, "read") or (readable is not None and not readable()):
            raise ValueError(f"expected a readable file: {target.uri}")
    place: OpenOptions = {"uri": target.uri, "base": target.base}
    if isinstance(target, Descriptor):
        return _read(target.number, place)
    return _read(target.file, {**place, "size": target.size})


def _read(file: Any, options: OpenOptions) -> Reader:
    with contextlib.closing(native_open(file, options)) as source:
        # Which has a handle of its own; an exception keeps this one in its traceback.
        return Reader(source)
