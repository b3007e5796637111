"""What the command ``tensorizer`` writes: lines for people, or one JSON object."""

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

from .standard import put, tell

#: Control characters, marks that turn the direction of text or are not seen, halves of characters.
_UNSHOWN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def shown(text: str) -> str:
    """Return a text with what a terminal would act on escaped as in Python."""
    return _UNSHOWN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def plural(count: int, noun: str) -> str:
    """Return a number of things: ``"1 tensor"``, ``"2 tensors"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def without_password(text: str) -> str:
    """Return a text with its addresses as others may see them: queries may be signatures."""
    text = re.sub(r"(\b\w+://[^/@:\s]*):[^/\s]*@", r"\1:***@", text)
    return re.sub(r"(\b\w+://[^?\s]*)\?(?!db=\d+\b(?!&))[^\s'\"]*", r"\1?...", text)


def brief(text: str, most: int = 200) -> str:
    """Return the beginning of a text that may be long."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def as_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON that a terminal does not act on."""
    # The one control character that JSON leaves as it is.
    return json.dumps(value, indent=indent).replace("\x7f", "\\u007f")


def tell_error(error: BaseException, json_wanted: bool) -> None:
    """Print an error on the standard error output."""
    message = without_password(_message(error))
    message = message if json_wanted else f"error: {message}"
    tell(error_line(type(error).__name__, message, json_wanted))


def _message(error: BaseException) -> str:
    """Return what an error says, without Python's number and quotes of what the system says."""
    if not isinstance(error, OSError) or error.filename is None or error.strerror is None:
        return str(error) or type(error).__name__
    where = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    return error.strerror if str(where) in error.strerror else f"{where}: {error.strerror}"


@contextlib.contextmanager
def warnings_told(json_wanted: bool) -> Iterator[None]:
    """Print warnings on the standard error output, without the line of code that warns."""

    def tell_warning(  # noqa: PLR0917 (what Python calls)
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = without_password(str(message))
        if json_wanted:
            tell(as_json({"warning": {"type": category.__name__, "message": text}}))
        else:
            tell(shown(f"tensorizer: warning: {text}"))

    with warnings.catch_warnings():
        warnings.showwarning = tell_warning
        yield


def error_line(kind: str, message: str, json_wanted: bool) -> str:
    """Return how an error is told on the standard error output."""
    if json_wanted:
        return as_json({"error": {"type": kind, "message": message}})
    return shown(f"tensorizer: {message}")


class _Styled(str):
    """A text with how a terminal shows it."""

    style: str


def bold(text: str) -> _Styled:
    """Return a text that stands out on a terminal."""
    return _styled(text, "1")


def dim(text: str) -> _Styled:
    """Return a text that stands back on a terminal."""
    return _styled(text, "2")


def _styled(text: str, style: str) -> _Styled:
    made = _Styled(text)
    made.style = style
    return made


def _has_styles() -> bool:
    """Tell whether the standard output is a terminal whose owner wants styles (no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout is not None and sys.stdout.isatty()


class Report:
    """What a command has found out and done."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._json, self._quiet = options.json, options.quiet
        self._styles = _has_styles()

    def line(self, *pieces: str) -> None:
        """Print a line of pieces, :func:`bold` and :func:`dim` ones among them."""
        if not self._json:
            put("".join(map(self._piece, pieces)))

    def _piece(self, piece: str) -> str:
        text = shown(piece)
        return (
            f"\x1b[{piece.style}m{text}\x1b[0m"
            if self._styles and isinstance(piece, _Styled)
            else text
        )

    def finding(self, text: str) -> None:
        """Print what the command was asked for."""
        if not self._json:
            # Files and addresses choose what is in it, which a terminal must not obey.
            put(shown(text))

    def summary(self, text: str) -> None:
        """Print what all findings come to, unless the command is quiet."""
        if not self._quiet:
            self.finding(text)

    def done(self, text: str) -> None:
        """Print what was done on the standard error output, unless the command is quiet."""
        if not self._quiet and not self._json:
            tell(shown(text))

    def result(self, **fields: Any) -> None:
        """Print the same for programs."""
        if self._json:
            put(as_json(fields, indent=1))
