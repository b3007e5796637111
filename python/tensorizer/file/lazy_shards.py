"""A checkpoint in several files, each opened when it is needed."""

from __future__ import annotations

from .._locks import ForkSafeLock
from .._native import Reader, ShardIndex
from .opening import SourceOpener


class LazyShards:
    """The files that an index names. Safe for use by several threads.

    Args:
        index: The index. It is closed with this object.
        open_index: Opens the source of the index again.

    """

    def __init__(self, index: ShardIndex, open_index: SourceOpener) -> None:
        self._index, self._open_index = index, open_index
        #: The opened files, by their numbers in the index.
        self._opened: dict[int, Reader] = {}
        self._locks: dict[int, ForkSafeLock] = {}
        self._whole: Reader | None = None
        self._whole_lock = ForkSafeLock()
        self._closed = False

    @property
    def uri(self) -> str:
        """The address of the index."""
        return self._index.uri

    def part(self, name: str) -> Reader | None:
        """Return a reader of the file that has a tensor.

        None if all files are needed to find it.
        """
        if self._closed:
            return None
        number = self._index.file_of(name)
        if number is None:
            return None
        with self._locks.setdefault(number, ForkSafeLock()).current():
            if number not in self._opened:
                self._opened[number] = self._index.open(number)
                if self._closed:
                    self._opened[number].close()
        part = self._opened[number]
        return part if part.format == "safetensors" and part.find(name) is not None else None

    def all_shards(self) -> Reader:
        """Return a reader of all files. After ``close()`` it still has names and shapes."""
        with self._whole_lock.current():
            if self._whole is None:
                if self._closed:
                    with self._open_index() as source:
                        self._whole = Reader(source)
                else:
                    self._whole = self._index.open_all()
                if self._closed:
                    self._whole.close()
            return self._whole

    def close(self) -> None:
        """Close all files. Closing again does nothing."""
        self._closed = True
        self._index.close()
        for reader in list(self._opened.values()):
            reader.close()
        if self._whole is not None:
            self._whole.close()
