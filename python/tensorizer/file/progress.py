"""How far a load or a save has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType

import torch

from ..tensors.usage import convert_bytes

#: What callers give: whether to show a bar, or what is called with the bytes of tensor data that
#: are done, and with how many there are.
ProgressType = bool | Callable[[int, int], object]

#: Seconds between two pictures of a bar.
_REDRAWN = 0.1
_WIDTH = 30
#: Characters of a line, which end before the edge of most terminals.
_LINE = 100


def data_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many bytes of data tensors have, of any layout: some are refused later."""
    return sum(one.numel() * one.element_size() for one in tensors if not one.is_meta)


class Progress:
    """Tells how many of some bytes are done: rising numbers, of which the last is all of them.

    Args:
        progress: What the caller has given.
        total: How many bytes there are, as far as it is known yet.

    Raises:
        TypeError: It is neither a bool nor callable.

    """

    def __init__(self, progress: ProgressType, total: int = 0) -> None:
        if not isinstance(progress, bool) and not callable(progress):
            raise TypeError(f"progress must be a bool or callable, not {progress!r}")
        self._tell: Callable[[int, int], object] | None = None
        if not isinstance(progress, bool):
            self._tell = progress
        elif progress and sys.stderr is not None and sys.stderr.isatty():
            self._tell = Bar().show
        self.total = total
        self._done = -1
        self._parts: list[int] = []

    def part(self) -> Callable[[int], None] | None:
        """Return what takes the bytes that are done of one file; None if nobody wants to know."""
        if self._tell is None:
            return None
        number = len(self._parts)
        self._parts.append(0)

        def told(moved: int) -> None:
            self._parts[number] = moved
            self._at(sum(self._parts))

        return told

    def finish(self) -> None:
        """Tell that everything is done."""
        if self._tell is not None:
            self._at(self.total)

    def _at(self, done: int) -> None:
        done = min(done, self.total)
        if self._tell is not None and done > self._done:
            self._done = done
            self._tell(done, self.total)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()


def _duration(seconds: float) -> str:
    """Return a duration for people: ``"8 s"``, ``"3:05 min"``, ``"2:03 h"``."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes = whole // 60
    return (
        f"{minutes}:{whole % 60:02} min"
        if minutes < 100
        else f"{minutes // 60}:{minutes % 60:02} h"
    )


class Bar:
    """A line on the terminal that grows, with bytes, their rate, and the time that is left."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._shown = -_REDRAWN
        self._ended = False

    def show(self, done: int, total: int) -> None:
        """Show how far it is, some times a second; the line ends with the last byte."""
        now = time.monotonic() - self._begun
        if self._ended or (done < total and now - self._shown < _REDRAWN):
            return
        self._ended = done >= total
        self._shown = now
        share = done / total if total else 1.0
        bar = "#" * int(_WIDTH * share)
        rate = done / max(now, 1e-3)
        far = f"{convert_bytes(done)} of {convert_bytes(total)}, {convert_bytes(rate)}/s"
        left = "" if self._ended or not rate else f", {_duration((total - done) / rate)} left"
        line = f"\r[{bar:<{_WIDTH}}] {share:4.0%} {far}{left}"
        try:
            # Over the line before, which may have been longer.
            print(f"{line:<{_LINE}}", end="\n" if self._ended else "", file=sys.stderr, flush=True)
        except OSError:
            # The terminal is gone, which is no reason to end what is shown there.
            self._ended = True
