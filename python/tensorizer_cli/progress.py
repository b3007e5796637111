"""The progress of a command on a terminal."""

from __future__ import annotations

import argparse
import contextlib
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
        super().__init__(is_shown)
        if is_shown:
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                # With a delay it prints nothing before there is progress.
                self._bar = tqdm(unit="B", unit_scale=True, delay=1e-6)
                self._callback = self._show

    def _show(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        # The next message begins a line of its own.
        if self._bar is not None:
            self._bar.close()
        elif 0 < self._done < self.total:
            print_error("")
