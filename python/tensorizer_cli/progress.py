"""The progress of a command on a terminal."""

from __future__ import annotations

import argparse
from typing import Any

from tensorizer.file.progress import ProgressReporter

from .output import print_error


class Progress(ProgressReporter):
    """Shows a bar on a terminal.

    Args:
        options: Those of the command.
        passes: How often each byte counts: twice for a copy, which reads and writes it.

    """

    def __init__(self, options: argparse.Namespace, passes: int = 1) -> None:
        super().__init__(not options.quiet and not options.json)
        show = self._callback
        if show is not None and passes > 1:
            self._callback = lambda done, total: show(done // passes, total // passes)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        # The next message begins a line of its own.
        if 0 <= self._done < self.total:
            print_error("")
