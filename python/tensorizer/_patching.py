"""Replaces attributes of other packages while the process is in any of some blocks."""

from __future__ import annotations

from typing import Any

from ._locks import ForkSafeLock


class Patch:
    """The replacement of attributes, while the process is in any block, of any thread.

    A context manager that may be entered again; the attributes are restored at the last exit.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._blocks = 0
        #: The replaced attributes: the object that has one, its name, and the original.
        self._replaced: list[tuple[Any, str, Any]] = []

    def apply(self) -> None:
        """Call :meth:`replace` for each attribute."""
        raise NotImplementedError

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class."""
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Restore the attributes."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)

    def __enter__(self) -> None:
        with self._lock.current():
            if self._blocks == 0:
                try:
                    self.apply()
                except BaseException:
                    self.restore()
                    raise
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock.current():
            self._blocks -= 1
            if self._blocks == 0:
                self.restore()
