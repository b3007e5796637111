"""The standard streams of the command, and the handling of errors in writing to them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from typing import IO, TextIO


def print_line(line: str) -> None:
    """Print a line on the standard output, unless that is closed.

    Raises:
        OSError: It cannot be written, for example to a full disk. A pipe without a reader is no
            error: the reader may have seen enough, and the exit status still has to be determined.

    """
    if sys.stdout is not None:
        with _checked(sys.stdout):
            _print(line, sys.stdout)


def flush() -> None:
    """Flush the standard output.

    Raises:
        OSError: See :func:`print_line`.

    """
    if sys.stdout is not None:
        with _checked(sys.stdout):
            sys.stdout.flush()


def copy_to_output(file: IO[bytes]) -> None:
    """Write the bytes of a file on the standard output.

    Raises:
        OSError: They cannot all be written there; also if it is closed, or its reader has gone.

    """
    where = "standard output"
    if sys.stdout is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), where)
    try:
        shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        raise OSError(error.errno, error.strerror, where) from None


def print_error(line: str) -> None:
    """Print a line on the standard error output; errors in writing it are ignored."""
    if sys.stderr is not None:
        try:
            _print(line, sys.stderr)
            sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)


def flush_or_discard() -> None:
    """Flush both streams, or discard what cannot be written.

    Otherwise the interpreter would try that at its end, and fail with status 120.
    """
    with contextlib.suppress(OSError):
        flush()
    if sys.stderr is not None:
        try:
            sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)


def open_closed_streams() -> None:
    """Open ``/dev/null`` for each standard stream that is closed.

    Otherwise the next file that is opened would get its number, and the printed lines.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _print(line: str, stream: TextIO) -> None:
    """Print a line, with escapes for characters that the encoding of the stream lacks."""
    try:
        print(line, file=stream)
    except UnicodeEncodeError:
        encoding = stream.encoding
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream)


@contextlib.contextmanager
def _checked(stream: TextIO) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        _discard(stream)
    except OSError as error:
        _discard(stream)
        raise OSError(error.errno, error.strerror, "standard output") from None


def _discard(stream: TextIO) -> None:
    """Redirect a stream, with the content of its buffer, to ``/dev/null``."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
