"""The storages of files of torch before 1.6, which follow the pickles without a directory."""

from __future__ import annotations

from typing import Any

from .._errors import FormatError, TruncatedError
from .._native import Reader
from .unpickled_tensors import shown

#: Records of such a file: the facts of the machine, the keys of the storages in their order, and
#: all bytes after these.
MACHINE, KEYS, STORAGES = "machine.pkl", "keys.pkl", "storages"
#: In front of each storage is the number of its elements.
_COUNT_BYTES = 8


def big_endian(uri: str) -> NotImplementedError:
    """Return the error for a file of a big-endian machine."""
    return NotImplementedError(
        f"{uri} was saved on a big-endian machine, and tensorizer is for little-endian ones: "
        "torch.load it and torch.save it again"
    )


class LegacyStorages:
    """Finds the storages of one or more files.

    Args:
        records: The open files; their entries are the records that are known so far.
        numbers: The numbers of all records, by name.
        lens: The bytes of each record, by number.

    """

    def __init__(self, records: Reader, numbers: dict[str, int], lens: list[int]) -> None:
        self._records, self._numbers, self._lens = records, numbers, lens
        #: The place of each storage, by its number: a record, and the position in it.
        self._places: dict[int, tuple[int, int]] = {}
        #: The same of the counts of elements, with the counts that are expected, and the storages
        #: for messages.
        self._counts: list[tuple[tuple[int, int], int, str]] = []

    def place(self, machine: Any, keys: Any, file: int, uri: str, counts: dict[str, int]) -> None:
        """Place the storages of a file.

        Args:
            machine: The facts of the machine that wrote it.
            keys: The keys of all of them, in their order, as the file states them.
            file: The file's number.
            uri: Its path or address.
            counts: The number of elements of each storage that the file's object refers to.

        """
        if isinstance(machine, dict) and machine.get("little_endian") is False:
            raise big_endian(uri)
        are_keys = isinstance(keys, list) and all(type(key) is str for key in keys)
        if not are_keys or sorted(keys) != sorted(counts):
            raise FormatError(
                f"expected the keys of {len(counts)} storages, found {shown(keys)} ({uri})"
            )
        record, at = self._numbers[f"{file}/{STORAGES}"], 0
        for key in keys:
            number = self._numbers[f"{file}/data/{key}"]
            self._counts.append(((record, at), counts[key], f"storage {shown(key)} of {uri}"))
            self._places[number] = record, at + _COUNT_BYTES
            at += _COUNT_BYTES + self._lens[number]
        if at > self._lens[record]:
            raise TruncatedError(
                f"expected {at} bytes of storages, found {self._lens[record]}: the file may be "
                f"incomplete ({uri})"
            )
        # Behind the storages, there may be another file.
        self._lens[record] = at

    def with_records(self) -> Reader:
        """Return the same files with all records, after comparing the counts in the files."""
        if not self._places:
            return self._records
        counts = self._records.tensors(
            [(str(n), "int64", (1,), place, False) for n, (place, *_) in enumerate(self._counts)]
        )
        found = counts.read(range(len(self._counts)))
        for (_, expected, what), raw in zip(self._counts, found, strict=True):
            count = int.from_bytes(raw, "little")
            if count != expected:
                raise FormatError(
                    f"expected a storage of {expected} elements, found {count} ({what})"
                )
        return self._records.tensors([
            (name, "uint8", (self._lens[number],), self._places.get(number, (number, 0)), False)
            for name, number in self._numbers.items()
        ])  # fmt: skip
