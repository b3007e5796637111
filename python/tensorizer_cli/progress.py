"""The progress bar of a command."""

from __future__ import annotations

import argparse
import sys

from tensorizer.file.progress import TerminalBar

from .standard_streams import print_error


class ProgressBar:
    """A progress bar on a terminal, for ``total`` bytes."""

    def __init__(self, total: int, options: argparse.Namespace) -> None:
        self._total, self._done, self._bar = total, 0, TerminalBar()
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._shown = is_terminal and not options.quiet and not options.json

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and 0 < self._done < self._total:
            print_error("")

    def add(self, count: int) -> None:
        """Count bytes that are done."""
        self._done += count
        if self._shown:
            self._bar.show(self._done, self._total)
