"""Objects on servers, for writing."""

from __future__ import annotations

import io
import logging
import os
from typing import Any

from .._native import Sink, TensorWriter
from .atomic import warn_of_overtaking

logger = logging.getLogger("tensorizer.stream_io")

#: Bytes that are buffered before they are sent, in parallel.
_WRITE_BEHIND = 64 << 20


class UploadFile(io.BufferedIOBase):
    """An object on a server, for writing from its beginning to its end.

    It appears when it is closed. If a ``with`` block raises, or the stream is garbage-collected
    before it was closed, an earlier object of its name stays.
    """

    mode = "wb"
    #: True if a caller has closed or abandoned it; the garbage collector does neither.
    ended = False

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._process = os.getpid()
        self._buffer = bytearray()
        self._sent = 0
        self._writer: TensorWriter | None = None

    @property
    def name(self) -> str:
        """The address."""
        return self._sink.uri

    def hand_over(self, options: dict[str, Any]) -> TensorWriter:
        """Let the native code write all that follows: a file of tensors. This only ends it."""
        self._check_open()
        self._send()
        self._writer = TensorWriter.to_sink(self._sink, self._sent, options)
        return self._writer

    def writable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def tell(self) -> int:
        """Return the number of bytes written here, without those of a native writer."""
        self._check_open()
        return self._sent + len(self._buffer)

    def write(self, data: Any, /) -> int:
        """Write all bytes of a buffer and return their number."""
        self._check_open()
        if self._writer is not None:
            raise io.UnsupportedOperation(f"a TensorSerializer writes {self.name}")
        with memoryview(data) as view:
            length = view.nbytes
            # Views with a dimension of 0 cannot be cast.
            if length:
                self._buffer += view.cast("B")
        if len(self._buffer) >= _WRITE_BEHIND:
            self._send()
        return length

    def _send(self) -> None:
        buffered, self._buffer = bytes(self._buffer), bytearray()
        try:
            self._sink.write(self._sent, buffered)
        except BaseException:
            # A part of the bytes may have been sent, so that nothing can follow.
            self.abandon()
            raise
        self._sent += len(buffered)

    def close(self) -> None:
        """Send what is left and make the object visible. Closing again does nothing."""
        if self.closed:
            return
        self.ended = True
        try:
            if self._writer is not None:
                # Does nothing if the writer has finished before.
                self._writer.finish()
            else:
                self._send()
                if not self._sink.publish(self._sent):
                    warn_of_overtaking(self.name)
        except BaseException:
            self._sink.abandon()
            raise
        finally:
            super().close()

    def abandon(self) -> None:
        """Abandon the object: an earlier one of its name stays."""
        self.ended = True
        self._abandon_upload()

    def _abandon_upload(self) -> None:
        super().close()
        if self._writer is not None:
            self._writer.abandon()
        self._sink.abandon()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close the stream, or abandon the object if the block raised."""
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __del__(self) -> None:
        # The base class would publish an object that may be incomplete.
        if getattr(self, "_sink", None) is not None and not self.closed:
            if self._writer is None and self._process == os.getpid():
                logger.error("%s was not closed, and so was not uploaded", self.name)
            self._abandon_upload()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"I/O operation on closed file {self.name}")
