"""Parts of many tensors of a file, checked and planned by one native call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from .._native import Reader, slice_by_index, slice_by_shard
from .._types import Name
from ..tensors.sharding import Part, Shard
from .tensor_file import TensorFile

#: A function from a tensor's index to its ranges, and to the index to apply to what is loaded of
#: them; it may raise.
_Fallback: TypeAlias = Callable[[int], tuple[Sequence[tuple[int, int]], tuple[Any, ...]]]


class PlannedParts(Mapping[int, Part]):
    """Parts of tensors of a file, by number, each made on first access.

    Args:
        numbers: The tensors of which ``reader`` has one range per dimension, in its order.
        reader: The reader of these parts.
        others: Further parts, by number.

    Attributes:
        reader: The reader.

    """

    def __init__(
        self, numbers: Sequence[int], reader: Reader, others: Mapping[int, Part] | None = None
    ) -> None:
        self.reader = reader
        #: A tensor may be there twice, with the same range.
        self._index_in_reader = dict(zip(numbers, range(len(numbers)), strict=True))
        self._made: dict[int, Part] = dict(others or {})

    @staticmethod
    def of_indices(
        file: TensorFile, numbers: Sequence[int], indices: Sequence[Any], fallback: _Fallback
    ) -> tuple[PlannedParts, dict[int, tuple[Any, ...]]]:
        """Return the parts that indices select, and the further indices to apply to loaded parts.

        ``fallback`` handles indices that are invalid, or not of the usual types.

        Raises:
            ValueError: Two names of one tensor have different indices.

        """
        if len(set(numbers)) < len(numbers):
            _refuse_different(file, numbers, indices)
        reader, lefts = slice_by_index(file.reader, numbers, indices, fallback)
        file.adopt(reader)
        parts = PlannedParts(numbers, reader)
        rests = {
            numbers[at]: left for at, left in lefts if parts._index_in_reader[numbers[at]] == at
        }
        return parts, rests

    @staticmethod
    def of_shard(
        file: TensorFile, wanted: Mapping[Name, int], shard: Shard, others: Mapping[int, Part]
    ) -> Mapping[int, Part]:
        """Return a rank's parts of tensors, together with other parts.

        Raises:
            IndexError: A tensor lacks the dimension to cut it in.
            ValueError: A tensor has a part already.

        """
        names, numbers = list(wanted), list(wanted.values())
        dims: list[Any] = [shard.dim] * len(names)
        if callable(shard.dim):
            dims = list(map(shard.dim, names))
        if None in dims:
            cut = [at for at, dim in enumerate(dims) if dim is not None]
            names = [names[at] for at in cut]
            numbers = [numbers[at] for at in cut]
            dims = [dims[at] for at in cut]
        if not numbers:
            return others
        end = _first_repeated(numbers, others)

        def fallback(at: int) -> tuple[Sequence[tuple[int, int]], tuple[Any, ...]]:
            one = dataclasses.replace(shard, dim=dims[at])
            part = one.part(names[at], file.reader.describe(numbers[at])[1])
            return part.boxes[0].ranges if part else (), ()

        until = end + 1
        rank, world = shard.rank, shard.world
        reader = slice_by_shard(file.reader, numbers[:until], dims[:until], rank, world, fallback)
        file.adopt(reader)
        if end < len(numbers):
            if numbers[end] in others:
                raise ValueError(f"both a slice and a shard of {names[end]!r} are asked for")
            raise ValueError(f"{names[end]!r} is requested twice, by two names")
        return PlannedParts(numbers, reader, others)

    def numbers_in_reader(self, numbers: Sequence[int]) -> list[int] | None:
        """Return the numbers of tensors in the reader; None if it lacks one of them."""
        try:
            return [self._index_in_reader[number] for number in numbers]
        except KeyError:
            return None

    def __getitem__(self, number: int) -> Part:
        found = self._made.get(number)
        if found is None:
            found = Part.of_ranges(self.reader.ranges(self._index_in_reader[number]) or ())
            self._made[number] = found
        return found

    def __contains__(self, number: object) -> bool:
        return number in self._index_in_reader or number in self._made

    def __iter__(self) -> Iterator[int]:
        yield from self._index_in_reader
        yield from (number for number in self._made if number not in self._index_in_reader)

    def __len__(self) -> int:
        return len(self._index_in_reader.keys() | self._made.keys())


def _first_repeated(numbers: Sequence[int], others: Mapping[int, Part]) -> int:
    """Return the index of the first tensor that has a part already; the count if none has."""
    taken = set(others)
    if not taken and len(set(numbers)) == len(numbers):
        return len(numbers)
    for at, number in enumerate(numbers):
        if number in taken:
            return at
        taken.add(number)
    return len(numbers)


def _refuse_different(file: TensorFile, numbers: Sequence[int], indices: Sequence[Any]) -> None:
    """Refuse different indices of one tensor, which its names may have.

    Raises:
        ValueError: There are some.

    """
    found: dict[int, str] = {}
    for number, index in zip(numbers, indices, strict=True):
        if found.setdefault(number, repr(index)) != repr(index):
            raise ValueError(
                f"two slices of tensor {file.reader.name(number)!r} are requested by two names: "
                f"{found[number]} and {index!r}"
            )
