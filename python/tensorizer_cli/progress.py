"""The progress of a command on a terminal."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

from tensorizer.file.progress import ProgressReporter

from .output import print_error


class Progress(ProgressReporter):
    """Shows a bar on a terminal: that of tqdm if it is installed, else the package's own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._bar: Any = None
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        is_shown = is_terminal and not options.quiet and not options.json
        has_tqdm = is_shown and importlib.util.find_spec("tqdm") is not None
        super().__init__(self._show if has_tqdm else is_shown)

    def _show(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="B", unit_scale=True)
        self._bar.update(done - self._bar.n)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        # What is printed next begins a line of its own.
        if self._bar is not None:
            self._bar.close()
        elif 0 < self._done < self.total:
            print_error("")
