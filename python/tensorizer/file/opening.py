"""Classifies the argument that names a file, and opens the file by the native module."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._native import Source, local_path, open as native_open
from .._types import Head, OpenOptions
from ..streams.addresses import is_address
from ..streams.atomic import AtomicRandom
from ..streams.endpoints import assigned_endpoint
from . import hints
from .options import ReadOptions

#: Characters; Linux takes paths of 4,095 bytes (PATH_MAX with its final zero byte).
_MAX_PATH = 4095


class NamedFile(NamedTuple):
    """A file that an argument names, unless it is the address of a server.

    Attributes:
        file: A path as a string, a descriptor, a binary file object, or a native source.
        uri: Its name in messages.
        base: The position at which the file begins.
        size: The size of a file object; None if it cannot seek, and for others.

    """

    file: Any
    uri: str
    base: int = 0
    size: int | None = None


@dataclass
class FileBytes:
    """The bytes of a file, accepted by :class:`OpenFile` alone."""

    data: bytes
    uri: str


def classify(file_obj: Any) -> NamedFile:
    """Classify a path, ``os.PathLike``, descriptor or binary file object by how it is opened.

    Raises:
        TypeError: It is none of these.
        ValueError: It is a text file, or cannot be a path.

    """
    native = getattr(file_obj, "_native_source", None)
    source = native() if native is not None else None
    if source is not None and (source.size is not None or file_obj.tell() == 0):
        return NamedFile(source, file_obj.name, file_obj.tell())
    if isinstance(file_obj, (str, bytes, os.PathLike)):
        # Addresses of servers are opened before this is called.
        local = local_path(file_obj) if isinstance(file_obj, str) else None
        path = _checked(local or os.fsdecode(file_obj), file_obj)
        return NamedFile(path, path)
    if isinstance(file_obj, int) and not isinstance(file_obj, bool):
        return NamedFile(file_obj, f"<descriptor {file_obj}>")
    if _is_text(file_obj):
        raise ValueError(f"expected a binary file, found a text file: {file_obj!r}")
    if not hasattr(file_obj, "read") and not hasattr(file_obj, "write"):
        raise TypeError(
            "expected a path, a file descriptor or a binary file object, "
            f"found {type(file_obj).__name__}{hints.of_source(file_obj)}"
        )
    uri = str(getattr(file_obj, "name", None) or f"<{type(file_obj).__name__}>")
    if not is_seekable(file_obj):
        return NamedFile(file_obj, uri, _position(file_obj))
    base = file_obj.tell()
    number = _descriptor(file_obj)
    if number is not None:
        return NamedFile(number, uri, base)
    size = file_obj.seek(0, os.SEEK_END)
    size = file_obj.tell() if size is None else size
    file_obj.seek(base)
    return NamedFile(file_obj, uri, base, size)


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


class SourceOpener(NamedTuple):
    """A function that opens the source of a file; again, if it is an address or a path.

    Attributes:
        file: See :class:`NamedFile`, or an address, or bytes.
        options: The options of the native call; None if ``file`` is a source.
        base: The position in such a source at which the file begins.
        is_local: True for a path or a descriptor.

    """

    file: Any
    options: OpenOptions | None
    base: int | None = None
    is_local: bool = False

    def __call__(self) -> contextlib.AbstractContextManager[Source]:
        """Open the source; a context manager that closes it."""
        if self.options is None:
            # It belongs to a stream.
            return contextlib.nullcontext(self.file)
        # Readers have handles of their own; without closing, an exception's traceback would keep
        # this one open.
        return contextlib.closing(native_open(self.file, self.options))


def source_opener(
    file_obj: Any, heads: Sequence[Head] | None, reading: ReadOptions
) -> SourceOpener:
    """Return the opener of a file, given the cached headers of an address and a cache for it."""
    if is_address(file_obj):
        cache_dir, headers = reading.get("cache_dir"), reading.get("headers") or {}
        options: OpenOptions = {
            "model": True,
            "heads": heads or None,
            "cache": None if cache_dir is None else os.fsdecode(cache_dir),
            "stale_if_error": reading.get("stale_if_error"),
            "max_bytes_per_second": reading.get("max_bytes_per_second"),
            "headers": list(headers.items()),
            "timeout": reading.get("timeout"),
            "default_endpoint": assigned_endpoint(reading=True),
        }
        return SourceOpener(file_obj, options)
    if isinstance(file_obj, FileBytes):
        return SourceOpener(file_obj.data, {"uri": file_obj.uri})
    file, uri, base, size = classify(file_obj)
    if isinstance(file, Source):
        return SourceOpener(file, None, base)
    if isinstance(file, str):
        return SourceOpener(file, {"path": True}, is_local=True)
    if not isinstance(file_obj, int):
        readable = getattr(file_obj, "readable", None)
        if not hasattr(file_obj, "read") or (readable is not None and not readable()):
            raise ValueError(f"expected a readable file: {uri}")
    options = {"uri": uri, "base": base, "size": size}
    return SourceOpener(file, options, is_local=isinstance(file, int))
