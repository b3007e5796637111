"""Classifies the argument that names a file, and opens the file by the native module."""

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


#: Characters; Linux takes paths of 4,095 bytes (PATH_MAX with its final zero byte).
_MAX_PATH = 4095


@dataclass
class LocalPath:
    """A path of the local file system."""

    path: str


@dataclass
class Descriptor:
    """A descriptor of the operating system, for the file that begins at position ``base``."""

    number: int
    uri: str
    base: int


@dataclass
class PythonFile:
    """A Python file object. Its size is None if it cannot seek."""

    file: Any
    uri: str
    base: int
    size: int | None


@dataclass
class FileBytes:
    """The bytes of a file, accepted by :class:`OpenFile` alone."""

    data: bytes
    uri: str


@dataclass
class RemoteSource:
    """A file on a server, which begins at position ``base``."""

    source: Source
    uri: str
    base: int


def classify(file_obj: Any) -> LocalPath | Descriptor | PythonFile | RemoteSource:
    """Classify a path, ``os.PathLike``, descriptor or binary file object by how it is opened.

    Raises:
        TypeError: It is none of these.
        ValueError: It is a text file, or cannot be a path.

    """
    native = getattr(file_obj, "_native_source", None)
    source = native() if native is not None else None
    if source is not None and (source.size is not None or file_obj.tell() == 0):
        return RemoteSource(source, file_obj.name, file_obj.tell())
    if isinstance(file_obj, str):
        # Addresses of servers were opened before this is called.
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
    """Refuse what cannot be a path, such as file content, without repeating all of it."""
    if len(path) <= _MAX_PATH and "\0" not in path:
        return path
    if isinstance(given, bytes):
        raise ValueError(
            f"expected a path, found {len(given)} bytes that begin with {given[:20]!r}: pass "
            "io.BytesIO(data) for a file in memory"
        )
    raise ValueError(f"expected a path, found {len(path)} characters: {path[:40]!r}...")


def _is_text(file_obj: Any) -> bool:
    if isinstance(file_obj, (io.RawIOBase, io.BufferedIOBase)):
        # Binary, whatever their mode: a member of a zip file has the mode "r".
        return False
    # Some file objects have a number as their mode.
    mode = getattr(file_obj, "mode", "b")
    return isinstance(file_obj, io.TextIOBase) or (isinstance(mode, str) and "b" not in mode)


def _position(file_obj: Any) -> int:
    """Return the number of bytes read from a stream so far; 0 if it does not know."""
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
    """Return the descriptor of a plain file; None for an object that may transform bytes.

    For example, ``gzip.GzipFile`` has a ``fileno()`` whose bytes are not those that it reads.
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
    """Tell whether an opened argument is a file of this machine."""
    is_not_a_path = is_address(opened) or isinstance(opened, FileBytes)
    target = None if is_not_a_path else classify(opened)
    return isinstance(target, (LocalPath, Descriptor))


def open_reader(file_obj: Any) -> Reader:
    """Open a descriptor, stream or object, or bytes in memory."""
    if isinstance(file_obj, FileBytes):
        return _read(file_obj.data, {"uri": file_obj.uri})
    target = classify(file_obj)
    if isinstance(target, LocalPath):
        return _read(target.path, {"path": True})
    if isinstance(target, RemoteSource):
        return Reader(target.source, target.base)
    if not isinstance(file_obj, int):
        readable = getattr(file_obj, "readable", None)
        if not hasattr(file_obj, "read") or (readable is not None and not readable()):
            raise ValueError(f"expected a readable file: {target.uri}")
    options: OpenOptions = {"uri": target.uri, "base": target.base}
    if isinstance(target, Descriptor):
        return _read(target.number, options)
    return _read(target.file, {**options, "size": target.size})


def _read(file: Any, options: OpenOptions) -> Reader:
    with contextlib.closing(native_open(file, options)) as source:
        # The reader has a handle of its own; without closing, an exception's traceback would keep
        # this one open.
        return Reader(source)
