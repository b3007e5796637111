"""The output of the command ``tensorizer``: lines of text, or one JSON object."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, TextIO

#: Control characters, marks that are invisible or turn the direction of text, and surrogates.
_UNSHOWN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
#: Calls of Python that messages name as a way out.
_PYTHON = re.compile(
    r"\btorch\.(?:jit\.)?load\b|\btensorizer(?:\.\w+)*\.\w+\(|\b(?:tensorizer_loading|Reader)\("
)
#: Codes of the styles of a terminal.
BOLD, DIM = "1", "2"


def open_closed_streams() -> None:
    """Open ``/dev/null`` for each standard stream that is closed.

    Otherwise the next file that is opened would get its number, and the printed lines.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def print_line(line: str) -> None:
    """Print a line on the standard output, unless that is closed.

    Raises:
        OSError: It cannot be written, for example to a full disk. A pipe without a reader is no
            error: the reader may have seen enough, and the exit status still has to be determined.

    """
    with contextlib.suppress(BrokenPipeError):
        _print(line, sys.stdout)


def print_error(line: str) -> None:
    """Print a line on the standard error output; errors in writing it are ignored."""
    with contextlib.suppress(OSError):
        _print(line, sys.stderr)


def copy_to_output(file: IO[bytes]) -> None:
    """Write the bytes of a file on the standard output.

    Raises:
        OSError: They cannot all be written there; also if it is closed, or its reader has gone.

    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "standard output")
    with _discarded_after_errors(sys.stdout):
        shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
        sys.stdout.flush()


def _print(line: str, stream: TextIO | None) -> None:
    """Print a line, with escapes for characters that the encoding of the stream lacks."""
    if stream is not None:
        encoding = stream.encoding or "utf-8"
        with _discarded_after_errors(stream):
            text = line.encode(encoding, "backslashreplace").decode(encoding)
            print(text, file=stream, flush=True)


@contextlib.contextmanager
def _discarded_after_errors(stream: TextIO) -> Iterator[None]:
    """Redirect a stream to ``/dev/null``, with the content of its buffer, if writing to it fails.

    Otherwise the interpreter would try to write that at its end, and fail with status 120.
    """
    try:
        yield
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        raise OSError(error.errno, error.strerror, "standard output") from None


def shown(text: str) -> str:
    """Return a text with everything escaped, as in Python, that a terminal would act on."""
    return _UNSHOWN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``"1 tensor"``, ``"2 tensors"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def without_password(text: str) -> str:
    """Return a text with the secrets of its addresses removed: passwords, and queries."""
    text = re.sub(r"(\b\w+://[^/@:\s]*):[^/\s]*@", r"\1:***@", text)
    return re.sub(r"(\b\w+://[^?\s]*)\?(?!db=\d+\b(?!&))[^\s'\"]*", r"\1?...", text)


def brief(text: str, most: int = 200) -> str:
    """Return the beginning of a text, if it is long."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def columns(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return rows whose columns have one width each, aligned to the side of ``<`` or ``>``."""
    escaped = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*escaped, strict=True)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=False))
    return [form.format(*row).rstrip() for row in escaped]


def as_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON without characters that a terminal acts on."""
    # The one control character that JSON does not escape.
    return json.dumps(value, indent=indent).replace("\x7f", "\\u007f")


def error_line(kind: str, message: str, json_wanted: bool, what: str = "error") -> str:
    """Return the line that reports an error or a warning on the standard error output."""
    if json_wanted:
        return as_json({what: {"type": kind, "message": message}})
    return shown(f"tensorizer: {what}: {message}")


def report_error(error: BaseException, json_wanted: bool) -> None:
    """Print an error on the standard error output."""
    message = _for_the_command(without_password(_message(error)))
    print_error(error_line(type(error).__name__, message, json_wanted))


def _for_the_command(message: str) -> str:
    """Say of a call of Python that the command has nothing instead, unless an option is named."""
    if not _PYTHON.search(message) or re.search(r"(?<!\S)--[a-z]", message):
        return message
    return f"{message} (in a Python program: the command cannot do it)"


def _message(error: BaseException) -> str:
    """Return the message of an error, without the number and the quotes that Python adds."""
    if not isinstance(error, OSError) or error.filename is None or error.strerror is None:
        return str(error) or type(error).__name__
    where = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    is_named = any(f"{quote}{where}{quote}" in error.strerror for quote in "`'\"")
    return error.strerror if is_named else f"{where}: {error.strerror}"


@contextlib.contextmanager
def warnings_reported(json_wanted: bool) -> Iterator[None]:
    """Print warnings on the standard error output, without the line of code that warns."""

    def report_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        text = _for_the_command(without_password(str(message)))
        print_error(error_line(category.__name__, text, json_wanted, "warning"))

    with warnings.catch_warnings():
        warnings.showwarning = report_warning
        yield


class Report:
    """The findings of a command, and the work that it has done."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._json, self._quiet = options.json, options.quiet
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self._styled = not plain and sys.stdout is not None and sys.stdout.isatty()

    def line(self, text: str = "", title: str = "", style: str = BOLD) -> None:
        """Print a result of the command, after a title that has a style on a terminal."""
        if not self._json:
            # They may contain text from files and addresses, which must not control the terminal.
            title = shown(title)
            if title and self._styled:
                title = f"\x1b[{style}m{title}\x1b[0m"
            print_line(title + shown(text))

    def lines(self, lines: Iterable[str]) -> None:
        """Print results at once, as there may be many."""
        text = "\n".join(map(shown, lines))
        if text and not self._json:
            print_line(text)

    def summary(self, text: str) -> None:
        """Print a summary of all findings, unless the command is quiet."""
        if not self._quiet:
            self.line(text)

    def done(self, text: str) -> None:
        """Print a line about completed work on the standard error output, unless quiet."""
        if not self._quiet and not self._json:
            print_error(shown(text))

    def result(self, **fields: Any) -> None:
        """Print the result as JSON, if that was requested."""
        if self._json:
            print_line(as_json(fields, indent=1))
