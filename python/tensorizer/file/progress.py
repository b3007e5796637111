"""Reports the progress of a load or a save."""

from __future__ import annotations

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
        self._bar: TerminalBar | TqdmBar | None = None
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


def _bar(*, grows: bool) -> TerminalBar | TqdmBar | None:
    """Return a bar for a notebook or the terminal; None without either."""
    if "ipykernel" in sys.modules:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return TerminalBar(grows=grows)
        return TqdmBar(tqdm, grows=grows)
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return TerminalBar(grows=grows) if is_terminal else None


class TqdmBar:
    """A progress bar of tqdm, which begins when the total is known."""

    def __init__(self, tqdm: Callable[..., Any], *, grows: bool = False) -> None:
        self._tqdm, self._grows = tqdm, grows
        self._bar: Any = None

    def show(self, done: int, total: int) -> None:
        """Show the progress; without a total that grows, the last byte ends the bar."""
        if not total:
            return
        if self._bar is None:
            self._bar = self._tqdm(unit="B", unit_scale=True)
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        self._bar.refresh()
        if done == total and not self._grows:
            self.close()

    def close(self) -> None:
        """End the bar; ending it again has no effect."""
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


class TerminalBar:
    """A progress bar on the terminal, with bytes, their rate, and the time that is left."""

    def __init__(self, *, grows: bool = False) -> None:
        self._grows = grows
        self._begun = time.monotonic()
        self._shown = -_REDRAW_SECONDS
        self._is_drawn = self._ended = False

    def show(self, done: int, total: int) -> None:
        """Show the progress, some times a second.

        The last byte ends the line, unless the total may grow.
        """
        now = time.monotonic() - self._begun
        is_last = 0 < total <= done and not self._grows
        if self._ended or not total or (not is_last and now - self._shown < _REDRAW_SECONDS):
            return
        self._shown = now
        share = done / total
        bar = "#" * int(_BAR_WIDTH * share)
        rate = done / max(now, 1e-3)
        far = f"{convert_bytes(done)} of {convert_bytes(total)}, {convert_bytes(rate)}/s"
        left = "" if done == total or not rate else f", {_duration((total - done) / rate)} left"
        # One line of the terminal, over the line before.
        room = shutil.get_terminal_size().columns - 1
        line = f"[{bar:<{_BAR_WIDTH}}] {share:4.0%} {far}"
        line += left if len(line) + len(left) <= room else ""
        self._write(f"\r{line[:room]:<{room}}")
        self._is_drawn = True
        if is_last:
            self.close()

    def close(self) -> None:
        """End the line; ending it again has no effect."""
        if self._is_drawn and not self._ended:
            self._write("\n")
        self._ended = True

    def _write(self, text: str) -> None:
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except OSError:
            # The terminal is gone, which is no reason to end the load or save.
            self._ended = True
