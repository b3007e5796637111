"""How far a command has come."""

from __future__ import annotations

import argparse
import sys
import time

from tensorizer.utils import convert_bytes

from .output import plural


def size(count: float) -> str:
    """Return a number of bytes for people."""
    return plural(int(count), "byte") if count < 1000 else convert_bytes(count)


class Progress:
    """A line on a terminal: how many of ``total`` bytes are done."""

    def __init__(self, total: int, options: argparse.Namespace) -> None:
        self._total, self._done, self._begun = total, 0, time.monotonic()
        there = sys.stderr is not None and sys.stderr.isatty()
        self._shown = there and not options.quiet and not options.json

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
                f"\r[{bar:<30}] {share:4.0%} {size(self._done)} {size(rate)}/s ",
                end="",
                file=sys.stderr,
            )
