"""The plan of the fetches of a group: tensors are cut into boxes, and these put into batches."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..tensors.sharding import Ranges

#: The alignment of pieces in a batch, in bytes: the longest element of torch has 16.
_ALIGNMENT = 64
#: Bytes in front of the data of a batch: they tell whether its owner has failed.
HEADER = 64
#: The most members that send each other only their parts of batches: each member then has as many
#: connections.
_MOST_SCATTERED = 128
#: The largest share of a batch that is sent as a part; for a larger one, all members receive all.
_SCATTERED_SHARE = 0.9
#: The most bytes to send of a tensor in one piece, as a multiple of its own bytes.
_MOST_COPIES = 2
#: Bytes of a contiguous run in a file from which on its only member reads it by itself.
_LONG_RUN = 1 << 20


@dataclass(frozen=True)
class Boxes:
    """The boxes of a tensor that members want.

    Attributes:
        of: By member, the range of each dimension that encloses what it wants; None if it wants
            nothing. Dimensions at the end that are wanted as a whole may be left out.
        widest: By dimension, the most indices that any member wants.
        apart: The only dimension in which the boxes differ, if no two of them overlap; else None.

    """

    of: tuple[Ranges | None, ...]
    widest: tuple[int, ...]
    apart: int | None

    @staticmethod
    def made(of: Sequence[Ranges | None]) -> Boxes | None:
        """Return the boxes of members; None if all want all columns of the same rows."""
        boxes = [box for box in of if box is not None]
        dims = max(map(len, boxes), default=0)
        if dims <= 1 and len(set(of)) <= 1:
            return None
        longer = [_longer(box, (sys.maxsize,) * dims) for box in boxes]
        widest = tuple(
            max(stop - start for start, stop in ends) for ends in zip(*longer, strict=True)
        )
        return Boxes(tuple(of), widest, _apart(longer, dims))


def _longer(box: Ranges, shape: Sequence[int]) -> Ranges:
    """Return a box with a range for every dimension."""
    return (*box, *((0, size) for size in shape[len(box) :]))


def _apart(boxes: Sequence[Ranges], dims: int) -> int | None:
    different = [dim for dim in range(dims) if len({box[dim] for box in boxes}) > 1]
    if len(different) != 1:
        return None
    ends = sorted(box[different[0]] for box in boxes)
    beside = all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
    return different[0] if beside else None


@dataclass(frozen=True)
class Wanted:
    """A tensor that members of a group want, or some of its rows.

    ``whole`` means that it must be fetched in one piece, as for its hashes. ``boxes`` are the parts
    of these rows that each member wants, if they differ.
    """

    number: int
    shape: tuple[int, ...]
    itemsize: int
    rows: tuple[int, int]
    whole: bool
    boxes: Boxes | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes that are fetched."""
        start, stop = (0, 1) if not self.shape else (0, self.shape[0]) if self.whole else self.rows
        return (stop - start) * math.prod(self.shape[1:]) * self.itemsize

    def unit(self, members: int) -> int:
        """Return the bytes of memory that a batch of it takes at least."""
        if not self.whole:
            return self.itemsize
        nbytes = math.prod(self.shape) * self.itemsize
        room = self.room(tuple((0, size) for size in self.shape))
        return (
            max(nbytes, members * (HEADER + _aligned(room)))
            if self._is_scattered(members)
            else nbytes
        )

    def box(self, member: int) -> Ranges | None:
        """Return the box that encloses what a member wants; None for nothing."""
        box: Ranges | None = (self.rows,)
        if self.boxes is not None:
            box = self.boxes.of[member]
        if box is None or not self.shape:
            return None if box is None else ()
        return _longer(box, self.shape)

    def room(self, ranges: Ranges) -> int:
        """Return the most bytes of a box that any single member wants."""
        sizes = [stop - start for start, stop in ranges]
        widest = () if self.boxes is None else self.boxes.widest
        fitting = itertools.starmap(min, zip(sizes, widest, strict=False))
        return math.prod((*fitting, *sizes[len(widest) :])) * self.itemsize

    def is_apart(self) -> bool:
        """Tell whether no two members want the same, in long runs: then each reads its own."""
        if self.boxes is None or self.boxes.apart is None or self.whole:
            return False
        dim = self.boxes.apart
        boxes = (box for box in self.boxes.of if box is not None)
        below = math.prod(self.shape[dim + 1 :]) * self.itemsize
        return all((box[dim][1] - box[dim][0]) * below >= _LONG_RUN for box in boxes)

    def pieces(self, members: int, most: int) -> tuple[bool, Iterator[Ranges]]:
        """Return True if members receive only their parts, and boxes in the order of their bytes.

        A box has at most ``most`` bytes, and so has all data that is sent of it; or it is one
        element, or the whole tensor.
        """
        everything = tuple((0, size) for size in self.shape)
        if not self.shape or self.whole:
            return self._is_scattered(members), iter([everything])
        cut = self._first_cut(most)
        ends = (self.rows, *everything[1:])
        row = self._row(cut)
        room = self.room((*((0, 1),) * (cut + 1), *everything[cut + 1 :]))
        step = max(1, most // max(row, 1))
        scattered = self._is_scattered(members) and room <= _SCATTERED_SHARE * row
        fitting = ((most // members - HEADER) // _ALIGNMENT * _ALIGNMENT) // max(room, 1)
        if scattered and fitting > 0:
            return True, _cut(ends, cut, min(step, fitting))
        return False, _cut(ends, cut, step)

    def _is_scattered(self, members: int) -> bool:
        if self.boxes is None or not self.shape or members > _MOST_SCATTERED:
            return False
        if not self.whole:
            return True
        nbytes = math.prod(self.shape) * self.itemsize
        room = self.room(tuple((0, size) for size in self.shape))
        return room <= _SCATTERED_SHARE * nbytes and members * room <= _MOST_COPIES * nbytes

    def _first_cut(self, most: int) -> int:
        """Return the first dimension of which one index has at most ``most`` bytes, or the last."""
        cut = 0
        while cut < len(self.shape) - 1 and self._row(cut) > most:
            cut += 1
        return cut

    def _row(self, dim: int) -> int:
        """Return the bytes of one index of a dimension."""
        return math.prod(self.shape[dim + 1 :]) * self.itemsize


def _cut(ends: Ranges, cut: int, step: int) -> Iterator[Ranges]:
    """Yield boxes of ``step`` indices of one dimension, and one index of each dimension before."""
    for above in itertools.product(*(range(*dim) for dim in ends[:cut])):
        for start in range(ends[cut][0], ends[cut][1], step):
            stop = min(start + step, ends[cut][1])
            yield (*((at, at + 1) for at in above), (start, stop), *ends[cut + 1 :])


@dataclass(frozen=True)
class Piece:
    """A box of a tensor whose bytes are contiguous in the file.

    ``start`` and ``nbytes`` are its position and length in a batch. ``place`` is the position of a
    member's part of it in the bytes that the member receives.
    """

    number: int
    ranges: Ranges
    start: int
    nbytes: int
    place: int


@dataclass(frozen=True)
class Batch:
    """A batch that one member fetches at a time, and sends to the others.

    Attributes:
        owner: The member that fetches it.
        pieces: The pieces that it consists of.
        nbytes: The bytes of all pieces.
        received: The bytes that each member receives.
        scattered: True if each member receives only its part.

    """

    owner: int
    pieces: tuple[Piece, ...]
    nbytes: int
    received: int
    scattered: bool


def batches(wanted: Iterable[Wanted], members: int, most: int) -> list[Batch]:
    """Cut tensors into batches, which members fetch in turn.

    A batch has at most ``most`` bytes, and so has all data that is sent of it; or it is one element
    or one whole tensor.
    """
    made: list[Batch] = []
    pieces: list[Piece] = []
    size = received = 0
    scattered = False

    def end_batch() -> None:
        nonlocal size, received
        if pieces:
            owner = len(made) % members
            each = _aligned(received) if scattered else size
            made.append(Batch(owner, tuple(pieces), size, each, scattered))
        pieces.clear()
        size = received = 0

    for tensor in wanted:
        apart, boxes = tensor.pieces(members, most)
        if apart != scattered:
            end_batch()
            scattered = apart
        for ranges in boxes:
            nbytes = math.prod(stop - start for start, stop in ranges) * tensor.itemsize
            room = tensor.room(ranges) if scattered else nbytes
            start, place = _aligned(size), _aligned(received)
            sent = members * (HEADER + _aligned(place + room)) if scattered else 0
            if max(start + nbytes, sent) > most:
                end_batch()
                start = place = 0
            pieces.append(Piece(tensor.number, ranges, start, nbytes, place))
            size, received = start + nbytes, place + room
    end_batch()
    return made


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def common(one: Ranges, other: Ranges | None) -> Ranges | None:
    """Return the intersection of two boxes; None if it is empty."""
    if other is None:
        return None
    ends = zip(one, other, strict=True)
    both = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in ends)
    return both if all(low < high for low, high in both) else None


def overlap(one: Ranges, other: Ranges | None) -> tuple[Ranges, Ranges] | None:
    """Return the intersection of two boxes, as ranges relative to the one and to the other."""
    both = common(one, other)
    if both is None or other is None:
        return None
    return _within(both, one), _within(both, other)


def _within(box: Ranges, around: Ranges) -> Ranges:
    """Return the ranges of a box relative to one that contains it."""
    ends = zip(box, around, strict=True)
    return tuple((low - first, high - first) for (low, high), (first, _) in ends)
