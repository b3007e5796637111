"""What the command ``tensorizer`` writes on a terminal."""

from __future__ import annotations

import re
import sys
import time
from typing import TextIO

from tensorizer.utils import convert_bytes

#: Control characters, marks that turn the direction of text or are not seen, halves of characters.
_UNSHOWN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line. Files and addresses choose what is in it, so that a terminal must not obey."""
    print(shown(text), file=file)


def shown(text: str) -> str:
    """Return a text with what a terminal would act on escaped as in Python."""
    return _UNSHOWN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Progress:
    """A line on a terminal: how many of ``total`` bytes are done."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._begun = total, 0, time.monotonic()
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._done:
            print(file=sys.stderr)

    def add(self, count: int) -> None:
        """Count bytes that are done."""
        self._done += count
        if self._shown:
            rate = self._done / max(time.monotonic() - self._begun, 1e-3)
            share = self._done / max(self._total, 1)
            bar = "#" * int(30 * share)
            print(
                f"\r[{bar:<30}] {share:4.0%} {convert_bytes(self._done)} {convert_bytes(rate)}/s ",
                end="",
                file=sys.stderr,
            )
