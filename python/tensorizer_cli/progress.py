"""The progress of a command on a terminal."""

from __future__ import annotations

import argparse
from typing import Any

from tensorizer._native import Call
from tensorizer.file.progress import ProgressReporter


class Progress(ProgressReporter):
    """Shows a bar on a terminal.

    Args:
        options: Those of the command.
        passes: The number of times that a byte is reported: two for a copy, which reads and writes.

    """

    def __init__(self, options: argparse.Namespace, passes: int = 1) -> None:
        super().__init__(not options.quiet and not options.json)
        show = self._callback
        if show is not None and passes > 1:
            self._callback = lambda done, total: show(done // passes, total // passes)
        # While it waits, the bar is drawn again.
        self._call = Call(f"tensorizer {options.command}", None)

    def __enter__(self) -> Progress:
        self._call.__enter__()
        self.attach()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._call.__exit__(*raised)
