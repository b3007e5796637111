"""Local files that become visible as a whole."""

from __future__ import annotations

import contextlib
import io
import logging
import os

from .._native import PathSink

logger = logging.getLogger("tensorizer.stream_io")


def warn_of_overtaking(name: str) -> None:
    """Log that a file was dropped because a later save to its path was complete before."""
    logger.warning(
        "%s: a save that this process began later is complete, so this one was dropped", name
    )


class WholeFile:
    """A file for writing that appears under its name when it is closed.

    If a ``with`` block raises, or the file is garbage-collected before it was closed, an earlier
    file of its name stays.
    """

    #: True if a serializer writes it, and closes or abandons it.
    belongs_to_serializer = False
    #: True if a caller has closed or abandoned it; the garbage collector does neither.
    ended = False
    #: True if it was dropped because a later save to its path was complete before.
    overtaken = False
    _process: int
    closed: bool

    @property
    def name(self) -> str:
        """The path or address."""
        raise NotImplementedError

    def _publish(self) -> bool:
        """Write what is left and make the file visible; return False if it was overtaken."""
        raise NotImplementedError

    def _discard(self) -> None:
        """Close the Python object, and drop what was written."""
        raise NotImplementedError

    def _close_object(self) -> None:
        super().close()  # type: ignore[misc]

    def close(self) -> None:
        """Make the file visible. Closing again does nothing."""
        if self.closed:
            return
        self.ended = True
        try:
            self.overtaken = not self._publish()
        except BaseException:
            self.abandon()
            raise
        if self.overtaken and not self.belongs_to_serializer:
            warn_of_overtaking(self.name)

    def abandon(self) -> None:
        """Abandon the file: an earlier one of its name stays."""
        self.ended = True
        self._discard()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close the file, or abandon it if the block raised."""
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __del__(self) -> None:
        # The base class would publish a file that may be incomplete. A serializer is being
        # collected too, and decides what to keep.
        if hasattr(self, "_sink") and not self.closed and not self.belongs_to_serializer:
            if self._process == os.getpid():
                logger.error("%s was not closed, and so was not written", self.name)
            self._discard()


class _Atomic(WholeFile):
    """A local file."""

    def __init__(self, path: str, buffer_size: int) -> None:
        self._final = path
        self._process = os.getpid()
        sink = PathSink(path)
        descriptor = sink.open()
        try:
            raw = io.FileIO(descriptor, "r+")
        except BaseException:
            os.close(descriptor)
            raise
        super().__init__(raw, buffer_size)  # type: ignore[call-arg]
        self._sink = sink

    @property
    def name(self) -> str:
        """The path."""
        return self._final

    def _publish(self) -> bool:
        self._discard_buffer_in_child()
        self.flush()  # type: ignore[attr-defined]
        size = os.fstat(self.fileno()).st_size  # type: ignore[attr-defined]
        self._close_object()
        return self._sink.publish(size)

    def publish_unclosed(self, size: int) -> tuple[bool, str | None]:
        """Make a file of ``size`` bytes visible that was never closed, without replacing another.

        Return True if it was kept, and its path if it could not have its own name. A serializer has
        written the bytes past this object, of which the garbage collector may have closed a part
        already.
        """
        with contextlib.suppress(ValueError):
            self._close_object()
        return self._sink.publish_unclosed(size)

    def _discard(self) -> None:
        if not self.closed:
            self._discard_buffer_in_child()
        self._sink.abandon()
        self._close_object()

    def _discard_buffer_in_child(self) -> None:
        """Discard the buffer in a forked child: the parent writes it."""
        if self._process != os.getpid():
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, self.fileno())  # type: ignore[attr-defined]
            os.close(nothing)


class AtomicWriter(_Atomic, io.BufferedWriter):
    """A file for writing."""

    mode = "wb"


class AtomicRandom(_Atomic, io.BufferedRandom):
    """A file for writing and reading."""

    mode = "rb+"
