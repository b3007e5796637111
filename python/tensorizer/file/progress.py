"""Reports the progress of a load or a save."""

from __future__ import annotations

import abc
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .._native import set_heartbeat
from ..tensors.usage import convert_bytes

#: The argument ``progress=``: True for a bar, or a function to call with the bytes of tensor data
#: that are done, and with the number of all.
ProgressType = bool | Callable[[int, int], object]

#: Seconds between two redraws of a bar.
_REDRAW_SECONDS = 0.1
_BAR_WIDTH = 30
#: Seconds after which a function is called again.
_LONGEST_SILENCE = 0.9


def data_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of data of tensors of any layout, even of those that are refused later."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(
            one.numel() * one.element_size() for one in tensors if not (is_lazy(one) or one.is_meta)
        )


class ProgressReporter(AbstractContextManager["ProgressReporter"]):
    """Reports the number of bytes done: rising numbers, of which the last is all bytes.

    Args:
        progress: The caller's argument.
        total: The number of all bytes, if it is known yet.
        grows: True if the total may grow when all bytes are done: a bar ends with :meth:`close`.
        attached: False if the present call does not report: see :meth:`attach`.

    Attributes:
        waits_for_flush: True if only :meth:`flush` calls the caller's function, and not the threads
            that read.

    Raises:
        TypeError: It is neither a bool nor callable.

    """

    def __init__(
        self,
        progress: ProgressType,
        total: int = 0,
        *,
        grows: bool = False,
        attached: bool = True,
    ) -> None:
        if not isinstance(progress, bool) and not callable(progress):
            raise TypeError(f"progress must be a bool or callable, not {progress!r}")
        self._callback: Callable[[int, int], object] | None = None
        self._bar: Bar | None = None
        if not isinstance(progress, bool):
            self._callback = progress
        elif progress:
            self._bar = _bar(grows=grows)
            self._callback = None if self._bar is None else self._bar.show
        self.total = total
        self.waits_for_flush = False
        self._done = -1
        self._called = time.monotonic()
        self._parts: list[int] = []
        if attached:
            self.attach()

    def attach(self) -> None:
        """Report at least once a second during the call that this thread is in."""
        if self._callback is not None:
            set_heartbeat(self.flush)

    def part(self) -> Callable[[int], None] | None:
        """Return a function to report the bytes done of one file; None if no progress is wanted."""
        if self._callback is None:
            return None
        number = len(self._parts)
        self._parts.append(0)

        def report(moved: int) -> None:
            self._parts[number] = moved
            if not self.waits_for_flush:
                self.flush()

        return report

    def flush(self) -> None:
        """Report the bytes that are done."""
        self._report(sum(self._parts))

    def finish(self) -> None:
        """Report that everything is done."""
        if self._done < self.total:
            self._report(self.total)

    def _report(self, done: int) -> None:
        """Report a larger number, and after a second without one the last number again."""
        if self._callback is None:
            return
        done, now = max(0, self._done, min(done, self.total)), time.monotonic()
        if done > self._done or now - self._called >= _LONGEST_SILENCE:
            self._done, self._called = done, now
            self._callback(done, self.total)

    def close(self) -> None:
        """End a bar, as after an error."""
        if self._bar is not None:
            self._bar.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.finish()
        self.close()


def _bar(*, grows: bool) -> Bar | None:
    """Return a bar for a notebook or the terminal; None without either."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return TerminalBar(grows=grows)
        return TqdmBar(tqdm, grows=grows)
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return TerminalBar(grows=grows) if is_terminal else None


class Bar(abc.ABC):
    """A progress bar, which is drawn some times a second, and at its end.

    Args:
        grows: True if the total may grow when all bytes are done.

    """

    def __init__(self, *, grows: bool = False) -> None:
        self._grows = grows
        self._begun = time.monotonic()
        self._drawn_at = -_REDRAW_SECONDS
        #: What was reported, and what is drawn of it.
        self._state: tuple[int, int] | None = None
        self._drawn: tuple[int, int] | None = None
        self._ended = False

    def show(self, done: int, total: int) -> None:
        """Show the progress. The last byte ends the bar, unless the total may grow."""
        if self._ended:
            return
        self._state = done, total
        is_last = 0 < total <= done and not self._grows
        seconds = time.monotonic() - self._begun
        if is_last or seconds - self._drawn_at >= _REDRAW_SECONDS:
            self._redraw(seconds)
        if is_last:
            self.close()

    def close(self) -> None:
        """End the bar, with what was reported last; ending it again has no effect."""
        if self._state not in (None, self._drawn) and not self._ended:
            self._redraw(time.monotonic() - self._begun)
        if self._drawn is not None and not self._ended:
            self._end()
        self._ended = True

    def _redraw(self, seconds: float) -> None:
        if self._state is not None:
            self._drawn, self._drawn_at = self._state, seconds
            self._draw(*self._state, seconds)

    @abc.abstractmethod
    def _draw(self, done: int, total: int, seconds: float) -> None:
        """Draw the bar after so many seconds; the total is 0 while the file is being opened."""

    @abc.abstractmethod
    def _end(self) -> None:
        """End a bar that is drawn."""


class TqdmBar(Bar):
    """A progress bar of tqdm, which begins when the total is known."""

    def __init__(self, tqdm: Callable[..., Any], *, grows: bool = False) -> None:
        super().__init__(grows=grows)
        self._tqdm = tqdm
        self._bar: Any = None

    def _draw(self, done: int, total: int, seconds: float) -> None:
        if not total:
            return
        if self._bar is None:
            self._bar = self._tqdm(total=total, unit="B", unit_scale=True)
        elif self._bar.total != total:
            # A widget takes another total only so; the seconds are those since its beginning.
            begun = self._bar.start_t
            self._bar.reset(total)
            self._bar.start_t = begun
        self._bar.update(done - self._bar.n)
        self._bar.refresh()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    """Return a duration as text: ``"8 s"``, ``"3:05 min"``, ``"2:03 h"``."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 100:
        return f"{minutes}:{whole % 60:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h"


class TerminalBar(Bar):
    """A progress bar on the terminal, with bytes, their rate, and the time that is left."""

    def _draw(self, done: int, total: int, seconds: float) -> None:
        # One line of the terminal, over the line before.
        room = shutil.get_terminal_size().columns - 1
        line, left = f"opening: {_duration(seconds)}", ""
        if total:
            share, rate = done / total, done / max(seconds, 1e-3)
            bar = "#" * int(_BAR_WIDTH * share)
            far = f"{convert_bytes(done)} of {convert_bytes(total)}, {convert_bytes(rate)}/s"
            line = f"[{bar:<{_BAR_WIDTH}}] {share:4.0%} {far}"
            if 0 < done < total:
                left = f", {_duration((total - done) / rate)} left"
        line += left if len(line) + len(left) <= room else ""
        self._write(f"\r{line[:room]:<{room}}")

    def _end(self) -> None:
        self._write("\n")

    def _write(self, text: str) -> None:
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except OSError:
            # The terminal is gone, which is no reason to end the load or save.
            self._ended = True
