"""The facts that ``tensorizer info`` collects about a file."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import native
from .file_description import FileDescription

if TYPE_CHECKING:
    from tensorizer._types import Name


@dataclass(frozen=True)
class TensorFacts:
    """A tensor of a file; ``nbytes`` is the size of its data in the file."""

    name: Name
    dtype: str
    shape: list[int]
    nbytes: int
    parameters: int


@dataclass
class Totals:
    """Sums over some tensors. Elements of buffers do not count as parameters."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0

    def add(self, tensor: TensorFacts) -> None:
        """Count a tensor."""
        self.tensors += 1
        self.parameters += tensor.parameters
        self.nbytes += tensor.nbytes


@dataclass(frozen=True)
class HashCounts:
    """The number of tensors that have a hash of each algorithm, among those looked at."""

    counts: dict[str, int]
    looked_at: int
    #: True if only the largest tensor was looked at, to spare a server a request for each.
    sampled: bool


class FileFacts:
    """The facts about a file.

    Attributes:
        tensors: All tensors, in the order of the file.
        all: Their totals.
        dtypes: The totals of the tensors of each dtype, most bytes first.
        hashes: The hashes that the file holds; None if its format has none, or they cannot be
            looked at without reading everything.
        alignment: The largest power of two that divides the positions of all data; None if there
            are none.
        metadata: The metadata of the file; None if they are damaged.
        damage: The error message of damaged metadata.

    """

    def __init__(self, file: FileDescription) -> None:
        self.tensors = list(_tensors(file))
        self.all = totals(self.tensors)
        by_dtype: dict[str, list[TensorFacts]] = {}
        for tensor in self.tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        of = {dtype: totals(tensors) for dtype, tensors in by_dtype.items()}
        self.dtypes = dict(sorted(of.items(), key=lambda item: -item[1].nbytes))
        self.hashes = self._hashes(file)
        self.alignment = _alignment(file)
        self.metadata: dict[str, str] | None = None
        self.damage = ""
        try:
            self.metadata = dict(file.reader.metadata or ())
        except ValueError as error:
            self.damage = str(error)

    def largest(self, count: int) -> list[TensorFacts]:
        """Return the tensors with the most bytes, largest first."""
        return sorted(self.tensors, key=lambda tensor: -tensor.nbytes)[:count]

    def _hashes(self, file: FileDescription) -> HashCounts | None:
        """Look at the hashes of all tensors; on a server or in a checkpoint only of the largest."""
        reader = file.first
        if reader is None or reader.version is None or not reader.seekable:
            return None
        lens = reader.data_lens()
        numbers = [number for number, length in enumerate(lens) if length]
        sampled = (not reader.local or reader is not file.reader) and len(numbers) > 1
        if sampled:
            numbers = [max(numbers, key=lens.__getitem__)]
        found = reader.hashes(numbers)
        counts = Counter(name for hashes in found for name, _ in hashes)
        return HashCounts(dict(counts), len(numbers), sampled)


def totals(tensors: Iterable[TensorFacts]) -> Totals:
    """Return the totals of some tensors."""
    together = Totals()
    for tensor in tensors:
        together.add(tensor)
    return together


def _tensors(file: FileDescription) -> Iterator[TensorFacts]:
    buffer = native.module().KINDS.index("buffer")
    for number in range(len(file)):
        dtype, shape, _ = file.reader.describe(number)
        is_buffer = file.kinds[number] == buffer
        yield TensorFacts(
            file.reader.name(number),
            dtype,
            shape,
            file.data_lens[number],
            0 if is_buffer else math.prod(shape),
        )


def _alignment(file: FileDescription) -> int | None:
    reader = file.first
    if reader is None:
        return None
    places = zip(reader.offsets(), reader.data_lens(), strict=True)
    starts = [start for (_, start), length in places if length]
    together = functools.reduce(operator.or_, starts, 0)
    return together & -together if together else None
