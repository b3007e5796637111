"""The output of the command ``tensorizer``: lines of text, or one JSON object."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

from .standard_streams import print_error, print_line

#: Control characters, marks that are invisible or turn the direction of text, and surrogates.
_UNSHOWN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


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


def as_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON without characters that a terminal acts on."""
    # The one control character that JSON does not escape.
    return json.dumps(value, indent=indent).replace("\x7f", "\\u007f")


def report_error(error: BaseException, json_wanted: bool) -> None:
    """Print an error on the standard error output."""
    message = without_password(_message(error))
    message = message if json_wanted else f"error: {message}"
    print_error(error_line(type(error).__name__, message, json_wanted))


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

    def report_warning(  # noqa: PLR0917 (what Python calls)
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = without_password(str(message))
        if json_wanted:
            print_error(as_json({"warning": {"type": category.__name__, "message": text}}))
        else:
            print_error(shown(f"tensorizer: warning: {text}"))

    with warnings.catch_warnings():
        warnings.showwarning = report_warning
        yield


def error_line(kind: str, message: str, json_wanted: bool) -> str:
    """Return the line that reports an error on the standard error output."""
    if json_wanted:
        return as_json({"error": {"type": kind, "message": message}})
    return shown(f"tensorizer: {message}")


class _Styled(str):
    """A text with its style on a terminal."""

    style: str


def bold(text: str) -> _Styled:
    """Return a text that is bold on a terminal."""
    return _styled(text, "1")


def dim(text: str) -> _Styled:
    """Return a text that is dimmed on a terminal."""
    return _styled(text, "2")


def _styled(text: str, style: str) -> _Styled:
    made = _Styled(text)
    made.style = style
    return made


def _has_styles() -> bool:
    """Tell whether standard output is a terminal, and styles are not disabled (no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout is not None and sys.stdout.isatty()


class Report:
    """The findings of a command, and the work that it has done."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._json, self._quiet = options.json, options.quiet
        self._styles = _has_styles()

    def line(self, *pieces: str) -> None:
        """Print a line of pieces, :func:`bold` and :func:`dim` ones among them."""
        if not self._json:
            print_line("".join(map(self._piece, pieces)))

    def _piece(self, piece: str) -> str:
        text = shown(piece)
        return (
            f"\x1b[{piece.style}m{text}\x1b[0m"
            if self._styles and isinstance(piece, _Styled)
            else text
        )

    def finding(self, text: str) -> None:
        """Print a result of the command."""
        if not self._json:
            # It may contain text from files and addresses, which must not control the terminal.
            print_line(shown(text))

    def summary(self, text: str) -> None:
        """Print a summary of all findings, unless the command is quiet."""
        if not self._quiet:
            self.finding(text)

    def done(self, text: str) -> None:
        """Print a line about completed work on the standard error output, unless quiet."""
        if not self._quiet and not self._json:
            print_error(shown(text))

    def result(self, **fields: Any) -> None:
        """Print the result as JSON, if that was requested."""
        if self._json:
            print_line(as_json(fields, indent=1))
