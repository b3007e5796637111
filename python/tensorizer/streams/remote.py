"""Files on servers, for reading."""

from __future__ import annotations

import io
import os
import time
from typing import Any

from .._native import Source, open as native_open
from .._types import OpenOptions

#: Bytes that a stream requests from its server at a time when it is read from Python.
_READ_AHEAD = 8 << 20


class RemoteFile(io.BufferedIOBase):
    """A file on a server, for reading.

    Args:
        uri: The address.
        options: The options of the native code.
        begin: Position in the file at which the stream begins to be read.
        end: Position at which the stream ends, or None for the end of the file.
        buffer_size: Bytes requested at a time; None for a default.

    """

    def _begin(
        self, uri: str, options: OpenOptions, begin: int | None, end: int | None, buffer: int | None
    ) -> None:
        if begin is not None and begin < 0:
            raise ValueError(f"begin must not be negative, but is {begin}")
        if end is not None and end <= (begin or 0):
            raise ValueError(f"end must be larger than begin, but they are {end} and {begin or 0}")
        asked = time.monotonic()
        self._source = native_open(uri, options)
        #: The seconds that it took to open the address, and that each request took.
        self._setup_seconds = time.monotonic() - asked
        self._latencies: list[float] = []
        self._headers = self._source.headers()
        self._end = end
        self._position = begin or 0
        self._request_bytes = buffer or _READ_AHEAD
        self._buffer = b""
        self._buffer_start = 0
        self._context: list[str] = []
        self.bytes_read = self.bytes_skipped = self.read_operations = 0

    @property
    def name(self) -> str:
        """The address, without its secrets."""
        return self._source.uri

    mode = "rb"

    def _native_source(self) -> Source | None:
        """Return the native source; None if the stream is closed, or ends before the file."""
        return None if self._end is not None or self.closed else self._source

    def register_error_context(self, msg: str) -> None:
        """Add a text to the errors of later reads."""
        self._context.append(msg)

    def readable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def seekable(self) -> bool:
        """Tell whether the server supports ranges, so that this can be read at any position."""
        self._check_open()
        return self._source.size is not None

    def tell(self) -> int:
        """Return the position of the next byte in the file."""
        self._check_open()
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Move to another position in the file and return it."""
        self._check_open()
        if whence == os.SEEK_CUR:
            position += self._position
        elif whence == os.SEEK_END:
            size = self._source.size
            if size is None and self._end is None:
                raise io.UnsupportedOperation(f"the size of {self.name} is not known")
            position += min(n for n in (size, self._end) if n is not None)
        elif whence != os.SEEK_SET:
            raise ValueError(f"unknown whence: {whence}")
        if position < 0:
            raise ValueError(f"cannot seek to {position}")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        """Return ``size`` bytes, fewer at the end only; all that are left if it is negative."""
        self._check_open()
        parts = []
        left = None if size is None or size < 0 else size
        while left is None or left > 0:
            part = self._read_some(left)
            if not part:
                break
            parts.append(part)
            left = None if left is None else left - len(part)
        return b"".join(parts)

    def read1(self, size: int = -1) -> bytes:
        """Return some bytes, at most ``size`` unless it is negative."""
        self._check_open()
        return self._read_some(None if size < 0 else size)

    def readinto(self, ba: Any) -> int:
        """Fill a buffer, except at the end, and return the number of bytes."""
        with memoryview(ba).cast("B") as view:
            data = self.read(len(view))
            view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the stream. Closing again does nothing."""
        # A stream that could not be opened, which the collector closes too, has no source.
        if not self.closed and hasattr(self, "_source"):
            self._source.close()
            self._buffer = b""
        super().close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"I/O operation on closed file {self.name}")

    def _read_some(self, most: int | None) -> bytes:
        """Return some bytes at the position, and buffer those that were read beyond them."""
        at = self._position - self._buffer_start
        if not 0 <= at < len(self._buffer):
            wanted = self._request_bytes if most is None else max(most, self._request_bytes)
            if self._end is not None:
                wanted = min(wanted, max(0, self._end - self._position))
            asked = time.monotonic()
            try:
                self._buffer = self._source.read(self._position, wanted)
            except OSError as error:
                if self._context:
                    raise type(error)(f"{error} ({'; '.join(self._context)})") from error
                raise
            self._buffer_start, at = self._position, 0
            self.read_operations += 1
            self._latencies.append(time.monotonic() - asked)
        part = self._buffer[at:] if most is None else self._buffer[at : at + most]
        self._position += len(part)
        self.bytes_read += len(part)
        return part
