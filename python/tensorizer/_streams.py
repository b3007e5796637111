"""Files of servers as Python file objects."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import weakref
from typing import Any, Protocol

from ._native import PathSink, Sink, Source

logger = logging.getLogger("tensorizer.stream_io")

#: Bytes that a stream asks of its server at a time when it is read from Python.
_READ_AHEAD = 8 << 20
#: Bytes that are kept until they are sent, in parallel.
_WRITE_BEHIND = 64 << 20


def check_range(begin: int | None, end: int | None) -> None:
    """Refuse what is not a range."""
    if begin is not None and begin < 0:
        raise ValueError(f"begin must not be negative, but is {begin}")
    if end is not None and end <= (begin or 0):
        raise ValueError(f"end must be larger than begin, but they are {end} and {begin or 0}")


class RemoteFile(io.BufferedIOBase):
    """A file of a server, for reading.

    Args:
        source: What to read.
        begin: Position in the file at which the stream begins to be read.
        end: Position at which the stream ends, or None for the end of the file.
        buffer_size: Bytes asked for at a time; None for a default.

    """

    def __init__(
        self, source: Source, begin: int | None, end: int | None, buffer_size: int | None
    ) -> None:
        self._source = source
        self._end = end
        self._position = begin or 0
        self._ahead = buffer_size or _READ_AHEAD
        self._kept = b""
        self._kept_at = 0
        self._context: list[str] = []
        self.bytes_read = 0
        self.bytes_skipped = 0
        self.read_operations = 0

    @property
    def name(self) -> str:
        """The address, without its secrets."""
        return self._source.uri

    mode = "rb"

    def _native_source(self) -> Source | None:
        """Return what the native code reads, unless this stream stops before the file does."""
        return None if self._end is not None or self.closed else self._source

    def register_error_context(self, msg: str) -> None:
        """Have a text added to the errors of later reads."""
        self._context.append(msg)

    def readable(self) -> bool:
        """Tell that this can be read."""
        self._check_open()
        return True

    def seekable(self) -> bool:
        """Tell whether the server sends ranges, so that this can be read anywhere."""
        self._check_open()
        return self._source.size is not None

    def tell(self) -> int:
        """Return the position of the next byte in the file."""
        self._check_open()
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
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

    def read(self, size: int | None = -1, /) -> bytes:
        """Return ``size`` bytes, fewer at the end only; all that are left if it is negative."""
        self._check_open()
        parts = []
        left = None if size is None or size < 0 else size
        while left is None or left > 0:
            part = self._some(left)
            if not part:
                break
            parts.append(part)
            left = None if left is None else left - len(part)
        return b"".join(parts)

    def read1(self, size: int = -1, /) -> bytes:
        """Return some bytes, at most ``size`` unless it is negative."""
        self._check_open()
        return self._some(None if size < 0 else size)

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, except at the end, and return the number of bytes."""
        with memoryview(buffer).cast("B") as view:
            data = self.read(len(view))
            view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the stream. Closing again does nothing."""
        if not self.closed:
            self._source.close()
            self._kept = b""
        super().close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"I/O operation on closed file {self.name}")

    def _some(self, most: int | None) -> bytes:
        """Return some bytes at the position, and keep what was read beyond them."""
        at = self._position - self._kept_at
        if not 0 <= at < len(self._kept):
            wanted = self._ahead if most is None else max(most, self._ahead)
            if self._end is not None:
                wanted = min(wanted, max(0, self._end - self._position))
            try:
                self._kept = self._source.read(self._position, wanted)
            except OSError as error:
                if self._context:
                    raise type(error)(f"{error} ({'; '.join(self._context)})") from error
                raise
            self._kept_at, at = self._position, 0
            self.read_operations += 1
        part = self._kept[at:] if most is None else self._kept[at : at + most]
        self._position += len(part)
        self.bytes_read += len(part)
        return part


class Serializer(Protocol):
    """What writes a whole file into a stream, past its methods."""

    def close(self) -> None:
        """Complete the file."""

    def _abandon(self) -> None:
        """Give the file up."""


class UploadFile(io.BufferedIOBase):
    """An object of a server, for writing from its beginning to its end.

    It appears when it is closed. If a ``with`` block ends by an exception, or the stream is
    forgotten without having been closed, what was there before stays.
    """

    mode = "wb"

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._process = os.getpid()
        self._held = bytearray()
        self._sent = 0
        self._serializer: weakref.ref[Serializer] | None = None

    @property
    def name(self) -> str:
        """The address."""
        return self._sink.uri

    def _native_sink(self, serializer: Serializer) -> tuple[Sink, int]:
        """Return what the native code writes to, and from where on."""
        self._check_open()
        self._send()
        self._serializer = weakref.ref(serializer)
        return self._sink, self._sent

    def writable(self) -> bool:
        """Tell that this can be written."""
        self._check_open()
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        self._check_open()
        return self._sent + len(self._held)

    def write(self, data: Any, /) -> int:
        """Write all bytes of a buffer and return their number."""
        self._check_open()
        if self._serializer is not None:
            raise io.UnsupportedOperation(f"a TensorSerializer writes {self.name}")
        with memoryview(data) as view:
            self._held += view.cast("B")
            length = view.nbytes
        if len(self._held) >= _WRITE_BEHIND:
            self._send()
        return length

    def _send(self) -> None:
        held, self._held = bytes(self._held), bytearray()
        try:
            self._sink.write(self._sent, held)
        except BaseException:
            # A part of them may have been sent, so that nothing can follow.
            self.abandon()
            raise
        self._sent += len(held)

    def close(self) -> None:
        """Send what is left and make the object visible. Closing again does nothing."""
        if self.closed:
            return
        serializer = None if self._serializer is None else self._serializer()
        try:
            if serializer is not None:
                self._serializer = None
                super().close()
                serializer.close()
            elif self._serializer is None:
                self._send()
                self._sink.publish(self._sent)
        except BaseException:
            self._sink.abandon()
            raise
        finally:
            super().close()

    def abandon(self) -> None:
        """Give the object up: what was there before stays."""
        serializer = None if self._serializer is None else self._serializer()
        super().close()
        self._sink.abandon()
        if serializer is not None:
            serializer._abandon()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close the stream, or give the object up if the block raised."""
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __del__(self) -> None:
        # That of the base class would publish what may be incomplete.
        if getattr(self, "_sink", None) is not None and not self.closed:
            if self._serializer is None and self._process == os.getpid():
                logger.error("%s was not closed, and so was not uploaded", self.name)
            self.abandon()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"I/O operation on closed file {self.name}")


class _Atomic:
    """A local file that appears under its path when it is closed.

    If a ``with`` block ends by an exception, or the file is forgotten without having been closed,
    what was there before stays.
    """

    #: Whether a serializer writes it, and closes it or gives it up.
    belongs_to_serializer = False

    def _start(self, path: str, buffer_size: int) -> None:
        self._final = path
        self._process = os.getpid()
        self._sink = PathSink(path)
        raw = io.FileIO(self._sink.open(), "r+")
        super().__init__(raw, buffer_size)  # type: ignore[call-arg]

    @property
    def name(self) -> str:
        """The path."""
        return self._final

    def close(self) -> None:
        """Make the file visible. Closing again does nothing."""
        if self.closed:  # type: ignore[attr-defined]
            return
        self._leave_to_the_maker()
        try:
            self._sink.publish(self._end())
        except BaseException:
            self.abandon()
            raise

    def close_forgotten(self, size: int) -> tuple[bool, str | None]:
        """Make a file of so many bytes visible without harm to one of its name; say where.

        A serializer has written them past this object, of which the garbage collector may have
        closed a part already.
        """
        with contextlib.suppress(ValueError):
            super().close()  # type: ignore[misc]
        return self._sink.publish_unclosed(size)

    def _end(self) -> int:
        self.flush()  # type: ignore[attr-defined]
        size = os.fstat(self.fileno()).st_size  # type: ignore[attr-defined]
        super().close()  # type: ignore[misc]
        return size

    def _leave_to_the_maker(self) -> None:
        """In a process that was forked off: what is in its buffer is the parent's to write."""
        if self._process != os.getpid():
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, self.fileno())  # type: ignore[attr-defined]
            os.close(nothing)

    def abandon(self) -> None:
        """Give the file up: what was there before stays."""
        if not self.closed:  # type: ignore[attr-defined]
            self._leave_to_the_maker()
        self._sink.abandon()
        super().close()  # type: ignore[misc]

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close the file, or give it up if the block raised."""
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __del__(self) -> None:
        # That of the base class would publish what may be incomplete.
        if getattr(self, "_sink", None) is not None and not self.closed:  # type: ignore[attr-defined]
            if self.belongs_to_serializer:
                # Which is forgotten too, and knows what to keep.
                return
            if self._process == os.getpid():
                logger.error("%s was not closed, and so was not written", self._final)
            self.abandon()


class AtomicWriter(_Atomic, io.BufferedWriter):
    """A file for writing."""

    mode = "wb"

    def __init__(self, path: str, buffer_size: int) -> None:
        self._start(path, buffer_size)


class AtomicRandom(_Atomic, io.BufferedRandom):
    """A file for writing and reading."""

    mode = "rb+"

    def __init__(self, path: str, buffer_size: int) -> None:
        self._start(path, buffer_size)
