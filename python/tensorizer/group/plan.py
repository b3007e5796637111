"""Who of a group fetches what: tensors cut into boxes, and these put together in batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..tensors.sharding import Ranges

#: Where each piece of a batch begins, in bytes: the longest element of torch has 16.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Wanted:
    """A tensor that members of a group want, or some of its rows.

    ``whole`` says that it must be fetched in one piece, as for its hashes.
    """

    number: int
    shape: tuple[int, ...]
    itemsize: int
    rows: tuple[int, int]
    whole: bool

    @property
    def nbytes(self) -> int:
        """How many bytes are fetched."""
        start, stop = (0, 1) if not self.shape else (0, self.shape[0]) if self.whole else self.rows
        return (stop - start) * math.prod(self.shape[1:]) * self.itemsize

    @property
    def unit(self) -> int:
        """How many bytes a batch of it has at least."""
        return math.prod(self.shape) * self.itemsize if self.whole else self.itemsize


@dataclass(frozen=True)
class Piece:
    """A box of a tensor whose bytes follow each other in the file.

    ``start`` and ``nbytes`` are its place in the bytes of a batch.
    """

    number: int
    ranges: Ranges
    start: int
    nbytes: int


@dataclass(frozen=True)
class Batch:
    """What one member fetches at a time, and gives to all."""

    owner: int
    pieces: tuple[Piece, ...]
    nbytes: int


def batches(wanted: Iterable[Wanted], members: int, most: int) -> list[Batch]:
    """Cut tensors into batches, which members fetch in turn.

    They have at most ``most`` bytes, or are one element or one whole tensor.
    """
    made: list[Batch] = []
    pieces: list[Piece] = []
    size = 0

    def end_batch() -> None:
        nonlocal size
        if pieces:
            made.append(Batch(len(made) % members, tuple(pieces), size))
        pieces.clear()
        size = 0

    for tensor in wanted:
        for ranges in _boxes(tensor, most):
            nbytes = math.prod(stop - start for start, stop in ranges) * tensor.itemsize
            start = -(-size // _ALIGNMENT) * _ALIGNMENT
            if start + nbytes > most:
                end_batch()
                start = 0
            pieces.append(Piece(tensor.number, ranges, start, nbytes))
            size = start + nbytes
    end_batch()
    return made


def _boxes(tensor: Wanted, most: int) -> Iterator[Ranges]:
    """Yield boxes of at most ``most`` bytes, or of one element, in the order of their bytes."""
    everything = tuple((0, size) for size in tensor.shape)
    if not tensor.shape or tensor.whole:
        yield everything
        return
    ends = (tensor.rows, *everything[1:])
    # The first dimension of which one index has few enough bytes is cut; of those before it each
    # index is by itself.
    cut = 0
    while cut < len(ends) - 1 and _row(tensor, cut) > most:
        cut += 1
    step = max(1, most // max(_row(tensor, cut), 1))
    for above in itertools.product(*(range(*dim) for dim in ends[:cut])):
        for start in range(ends[cut][0], ends[cut][1], step):
            stop = min(start + step, ends[cut][1])
            yield (*((at, at + 1) for at in above), (start, stop), *ends[cut + 1 :])


def _row(tensor: Wanted, dim: int) -> int:
    """Return the bytes of one index of a dimension."""
    return math.prod(tensor.shape[dim + 1 :]) * tensor.itemsize


def overlap(one: Ranges, other: Ranges) -> tuple[Ranges, Ranges] | None:
    """Return what two boxes have in common: its ranges in the one and in the other."""
    here, there = [], []
    for (start, stop), (other_start, other_stop) in zip(one, other, strict=True):
        low, high = max(start, other_start), min(stop, other_stop)
        if low >= high:
            return None
        here.append((low - start, high - start))
        there.append((low - other_start, high - other_start))
    return tuple(here), tuple(there)
