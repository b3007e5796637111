"""Objects on servers, for writing."""

from __future__ import annotations

import io
import os
from typing import Any

from .._native import Sink, TensorWriter
from .atomic import WholeFile

#: Bytes that are buffered before they are sent, in parallel.
_WRITE_BEHIND = 64 << 20


class UploadFile(WholeFile, io.BufferedIOBase):
    """An object on a server, for writing from its beginning to its end."""

    mode = "wb"

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

    def _publish(self) -> bool:
        if self._writer is not None:
            # Does nothing if the writer has finished before.
            self._writer.finish()
            published = True
        else:
            self._send()
            published = self._sink.publish(self._sent)
        self._close_object()
        return published

    def _discard(self) -> None:
        self._close_object()
        if self._writer is not None:
            self._writer.abandon()
        self._sink.abandon()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"I/O operation on closed file {self.name}")
