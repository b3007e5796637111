"""Parts of many tensors of a file, checked and planned by one native call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from .._native import Reader, indexed, shards
from .._types import Name
from ..tensors.sharding import Part, Shard
from .tensor_file import TensorFile

#: A function from a tensor's index to its ranges, and to the index to apply to what is loaded of
#: them; it may raise.
_Other: TypeAlias = Callable[[int], tuple[Sequence[tuple[int, int]], tuple[Any, ...]]]


class Cuts(Mapping[int, Part]):
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
        #: If a tensor has two ranges, the last one counts.
        self._places = dict(zip(numbers, range(len(numbers)), strict=True))
        self._made: dict[int, Part] = dict(others or {})

    @staticmethod
    def of_indices(
        file: TensorFile, numbers: Sequence[int], indices: Sequence[Any], other: _Other
    ) -> tuple[Cuts, dict[int, tuple[Any, ...]]]:
        """Return the parts that indices select, and the further indices to apply to loaded parts.

        ``other`` handles indices that are invalid, or not of the usual types.
        """
        reader, lefts = indexed(file.reader, numbers, indices, other)
        file.close_with(reader)
        cuts = Cuts(numbers, reader)
        rests = {numbers[at]: left for at, left in lefts if cuts._places[numbers[at]] == at}
        return cuts, rests

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
        end = _first_again(numbers, others)

        def other(at: int) -> tuple[Sequence[tuple[int, int]], tuple[Any, ...]]:
            one = dataclasses.replace(shard, dim=dims[at])
            part = one.part(names[at], file.reader.describe(numbers[at])[1])
            return part.boxes[0].ranges if part else (), ()

        until = end + 1
        rank, world = shard.rank, shard.world
        reader = shards(file.reader, numbers[:until], dims[:until], rank, world, other)
        file.close_with(reader)
        if end < len(numbers):
            raise ValueError(f"both a slice and a shard of {names[end]!r} are asked for")
        return Cuts(numbers, reader, others)

    def places(self, numbers: Sequence[int]) -> list[int] | None:
        """Return the numbers of tensors in the reader; None if it lacks one of them."""
        try:
            return [self._places[number] for number in numbers]
        except KeyError:
            return None

    def __getitem__(self, number: int) -> Part:
        found = self._made.get(number)
        if found is None:
            found = Part.of_ranges(self.reader.ranges(self._places[number]) or ())
            self._made[number] = found
        return found

    def __contains__(self, number: object) -> bool:
        return number in self._places or number in self._made

    def __iter__(self) -> Iterator[int]:
        yield from self._places
        yield from (number for number in self._made if number not in self._places)

    def __len__(self) -> int:
        return len(self._places.keys() | self._made.keys())


def _first_again(numbers: Sequence[int], others: Mapping[int, Part]) -> int:
    """Return the index of the first tensor that has a part already; the count if none has."""
    taken = set(others)
    if not taken and len(set(numbers)) == len(numbers):
        return len(numbers)
    for at, number in enumerate(numbers):
        if number in taken:
            return at
        taken.add(number)
    return len(numbers)
