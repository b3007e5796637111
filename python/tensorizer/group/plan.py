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
_MAX_SCATTERED_MEMBERS = 128
#: The largest share of a batch that is sent as a part; for a larger one, all members receive all.
_MAX_SCATTERED_SHARE = 0.9
#: The most bytes to send of a tensor in one piece, as a multiple of its own bytes.
_MAX_COPIES = 2
#: Bytes of a contiguous run in a file from which on its only member reads it by itself.
_MIN_LONG_RUN = 1 << 20


@dataclass(frozen=True)
class Boxes:
    """The boxes of a tensor that members want.

    Attributes:
        by_member: The range of each dimension that encloses what a member wants; None if it wants
            nothing. Dimensions at the end that are wanted as a whole may be left out.
        widest: By dimension, the most indices that any member wants.
        disjoint_dim: The only dimension in which the boxes differ, if no two of them overlap; else
            None.

    """

    by_member: tuple[Ranges | None, ...]
    widest: tuple[int, ...]
    disjoint_dim: int | None

    @staticmethod
    def from_ranges(by_member: Sequence[Ranges | None]) -> Boxes | None:
        """Return the boxes of members; None if all want all columns of the same rows."""
        boxes = [box for box in by_member if box is not None]
        dims = max(map(len, boxes), default=0)
        if dims <= 1 and len(set(by_member)) <= 1:
            return None
        longer = [_with_all_dims(box, (sys.maxsize,) * dims) for box in boxes]
        widest = tuple(
            max(stop - start for start, stop in ends) for ends in zip(*longer, strict=True)
        )
        return Boxes(tuple(by_member), widest, _disjoint_dim(longer, dims))


def _with_all_dims(box: Ranges, shape: Sequence[int]) -> Ranges:
    """Return a box with a range for every dimension."""
    return (*box, *((0, size) for size in shape[len(box) :]))


def _disjoint_dim(boxes: Sequence[Ranges], dims: int) -> int | None:
    different = [dim for dim in range(dims) if len({box[dim] for box in boxes}) > 1]
    if len(different) != 1:
        return None
    ends = sorted(box[different[0]] for box in boxes)
    are_disjoint = all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
    return different[0] if are_disjoint else None


@dataclass(frozen=True)
class SharedTensor:
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

    def min_batch_bytes(self, members: int) -> int:
        """Return the bytes of memory that a batch of it takes at least."""
        if not self.whole:
            return self.itemsize
        nbytes = math.prod(self.shape) * self.itemsize
        room = self.max_part_bytes(tuple((0, size) for size in self.shape))
        return (
            max(nbytes, members * (HEADER + _aligned(room)))
            if self._is_scattered(members)
            else nbytes
        )

    def box(self, member: int) -> Ranges | None:
        """Return the box that encloses what a member wants; None for nothing."""
        box: Ranges | None = (self.rows,)
        if self.boxes is not None:
            box = self.boxes.by_member[member]
        if box is None or not self.shape:
            return None if box is None else ()
        return _with_all_dims(box, self.shape)

    def max_part_bytes(self, ranges: Ranges) -> int:
        """Return the most bytes of a box that any single member wants."""
        sizes = [stop - start for start, stop in ranges]
        widest = () if self.boxes is None else self.boxes.widest
        fitting = itertools.starmap(min, zip(sizes, widest, strict=False))
        return math.prod((*fitting, *sizes[len(widest) :])) * self.itemsize

    def is_disjoint(self) -> bool:
        """Tell whether members want disjoint parts in long runs: then each reads its own."""
        if self.boxes is None or self.boxes.disjoint_dim is None or self.whole:
            return False
        dim = self.boxes.disjoint_dim
        boxes = (box for box in self.boxes.by_member if box is not None)
        below = math.prod(self.shape[dim + 1 :]) * self.itemsize
        return all((box[dim][1] - box[dim][0]) * below >= _MIN_LONG_RUN for box in boxes)

    def pieces(self, members: int, most: int) -> tuple[bool, Iterator[Ranges]]:
        """Return True if members receive only their parts, and boxes in the order of their bytes.

        A box has at most ``most`` bytes, and so has all data that is sent of it; or it is one
        element, or the whole tensor.
        """
        everything = tuple((0, size) for size in self.shape)
        if not self.shape or self.whole:
            return self._is_scattered(members), iter([everything])
        cut = self._dim_to_cut(most)
        ends = (self.rows, *everything[1:])
        row = self._index_bytes(cut)
        room = self.max_part_bytes((*((0, 1),) * (cut + 1), *everything[cut + 1 :]))
        step = max(1, most // max(row, 1))
        scattered = self._is_scattered(members) and room <= _MAX_SCATTERED_SHARE * row
        fitting = ((most // members - HEADER) // _ALIGNMENT * _ALIGNMENT) // max(room, 1)
        if scattered and fitting > 0:
            return True, _cut_boxes(ends, cut, min(step, fitting))
        return False, _cut_boxes(ends, cut, step)

    def _is_scattered(self, members: int) -> bool:
        if self.boxes is None or not self.shape or members > _MAX_SCATTERED_MEMBERS:
            return False
        if not self.whole:
            return True
        nbytes = math.prod(self.shape) * self.itemsize
        room = self.max_part_bytes(tuple((0, size) for size in self.shape))
        return room <= _MAX_SCATTERED_SHARE * nbytes and members * room <= _MAX_COPIES * nbytes

    def _dim_to_cut(self, most: int) -> int:
        """Return the first dimension of which one index has at most ``most`` bytes, or the last."""
        cut = 0
        while cut < len(self.shape) - 1 and self._index_bytes(cut) > most:
            cut += 1
        return cut

    def _index_bytes(self, dim: int) -> int:
        """Return the bytes of one index of a dimension."""
        return math.prod(self.shape[dim + 1 :]) * self.itemsize


def _cut_boxes(ends: Ranges, cut: int, step: int) -> Iterator[Ranges]:
    """Yield boxes of ``step`` indices of one dimension, and one index of each dimension before."""
    for above in itertools.product(*(range(*dim) for dim in ends[:cut])):
        for start in range(ends[cut][0], ends[cut][1], step):
            stop = min(start + step, ends[cut][1])
            yield (*((at, at + 1) for at in above), (start, stop), *ends[cut + 1 :])


@dataclass(frozen=True)
class Piece:
    """A box of a tensor whose bytes are contiguous in the file.

    ``start`` and ``nbytes`` are its position and length in a batch. ``received_start`` is the
    position of a member's part of it in the bytes that the member receives.
    """

    number: int
    ranges: Ranges
    start: int
    nbytes: int
    received_start: int


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


def batches(wanted: Iterable[SharedTensor], members: int, most: int) -> list[Batch]:
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
        tensor_scattered, boxes = tensor.pieces(members, most)
        if tensor_scattered != scattered:
            end_batch()
            scattered = tensor_scattered
        for ranges in boxes:
            nbytes = math.prod(stop - start for start, stop in ranges) * tensor.itemsize
            room = tensor.max_part_bytes(ranges) if scattered else nbytes
            start, received_start = _aligned(size), _aligned(received)
            sent = members * (HEADER + _aligned(received_start + room)) if scattered else 0
            if max(start + nbytes, sent) > most:
                end_batch()
                start = received_start = 0
            pieces.append(Piece(tensor.number, ranges, start, nbytes, received_start))
            size, received = start + nbytes, received_start + room
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
