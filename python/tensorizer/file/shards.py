"""A checkpoint in several files, of which those are opened that are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .._locks import OwnLock
from .._native import Reader

if TYPE_CHECKING:
    from .._native import Source


class Shards:
    """The files that an index names. Safe to be used by several threads.

    Args:
        open_index: Opens the index, which is done at once, and again if it was closed before all
            files were opened.
        prepare: Called with each reader before it is used.

    """

    def __init__(self, open_index: Callable[[], Source], prepare: Callable[[Reader], None]) -> None:
        self._open_index, self._prepare = open_index, prepare
        self._source: Source | None = open_index()
        self._lock = OwnLock()
        self._parts: list[Reader] = []
        self._whole: Reader | None = None
        self._closed = False

    @property
    def uri(self) -> str:
        """The address of the index."""
        return self._whole.uri if self._source is None and self._whole else self._index().uri

    @property
    def is_whole(self) -> bool:
        """True if all files are open, or it is no index."""
        return self._whole is not None

    def is_index(self) -> bool:
        """Tell whether it is the index of several files."""
        return self._index().is_index()

    def part(self, name: str) -> Reader | None:
        """Return a reader of the file that has a tensor, and perhaps of others.

        None where all files are needed to tell, or are open.
        """
        with self._lock.here():
            if self._whole is not None or self._closed:
                return None
            for part in self._parts:
                if part.find(name) is not None:
                    return part
            part = Reader(self._index(), wanted=[name])
            self._prepare(part)
            if part.format != "safetensors" or part.find(name) is None:
                part.close()
                return None
            self._parts.append(part)
            return part

    def whole(self) -> Reader:
        """Return a reader of all files."""
        with self._lock.here():
            if self._whole is None:
                source = self._index()
                try:
                    self._whole = Reader(source)
                finally:
                    if self._closed:
                        source.close()
                self._prepare(self._whole)
                if self._closed:
                    self._whole.close()
                else:
                    self.close_parts()
                    self._source = None
                    source.close()
            return self._whole

    def _index(self) -> Source:
        # After an end without all files their names and shapes can still be asked for.
        source = self._open_index() if self._source is None else self._source
        if not self._closed:
            self._source = source
        return source

    def stop(self) -> None:
        """End loads that are under way, and refuse more."""
        for reader in [*self._parts, *([] if self._whole is None else [self._whole])]:
            reader.stop()

    def close_parts(self) -> None:
        """Close what all files stand in for."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.close()

    def close(self) -> None:
        """Close all files. Closing again does nothing."""
        self._closed = True
        self.close_parts()
        source, self._source = self._source, None
        if source is not None:
            source.close()
        if self._whole is not None:
            self._whole.close()
