"""The plan of a group's load: blocks of tensors, and the share of each member in reading them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..tensors.batches import in_batches
from ..tensors.sharding import Ranges
from .wishes import Case, MergedWishes, Rows, with_all_dims

#: The alignment of tensors in a block, in bytes: the longest element of torch has 16.
_ALIGNMENT = 64
#: The most bytes of a block, and the fewest of a member's share, unless the file is small.
_MOST_BYTES, _MIN_SHARE = 256 << 20, 8 << 20
#: The fewest bytes of a share: each costs a read and a message to all.
_SMALLEST_SHARE = 1 << 20
#: The number of blocks of a load at least, if shares are long enough: nothing is exchanged until
#: the first one has been read.
_MIN_BLOCKS = 32


class Layout(NamedTuple):
    """A tensor of the file: its shape, and the bytes of an element."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return math.prod(self.shape[1:]) * self.itemsize


class Placed(NamedTuple):
    """Rows of a tensor that all members want, and the position of their bytes in a block.

    ``first`` is the position of these bytes in the tensor.
    """

    number: int
    rows: tuple[int, int]
    first: int
    start: int
    nbytes: int


class Piece(NamedTuple):
    """A part of a tensor that one member reads for others.

    Attributes:
        number: The number of the tensor.
        ranges: A box of it, or a range of its bytes.
        position: The position of these bytes in the memory of a block.

    """

    number: int
    ranges: Ranges
    position: int = 0


@dataclass(frozen=True)
class Block:
    """Tensors that are read and exchanged together.

    Attributes:
        numbers: The tensors, in the order of the file.
        gathered: Those that all members want, which have a place in the memory of the block.
        nbytes: The length of this memory.
        ends: The position at which each member's share of it ends.
        shared: By the ranks that want them: rows that some members want.

    """

    numbers: tuple[int, ...]
    gathered: tuple[Placed, ...]
    nbytes: int
    ends: tuple[int, ...]
    shared: Mapping[tuple[int, ...], list[tuple[int, Rows]]]

    def share(self, rank: int) -> list[Piece]:
        """Return the bytes of tensors that a member reads for all, in the order of the file."""
        low, high = self.ends[rank - 1] if rank else 0, self.ends[rank]
        found = []
        first = bisect.bisect_right(self.gathered, low, key=lambda one: one.start + one.nbytes)
        for one in itertools.islice(self.gathered, first, None):
            if one.start >= high:
                break
            start, stop = max(low, one.start), min(high, one.start + one.nbytes)
            before = one.first - one.start
            found.append(Piece(one.number, ((start + before, stop + before),), start))
        return found


class BlockPlan:
    """The blocks of a load, the same at all members.

    Args:
        wishes: The wishes of the members.
        layout: Returns the layout of a tensor.
        size: The number of members.

    """

    def __init__(self, wishes: MergedWishes, layout: Callable[[int], Layout], size: int) -> None:
        self._wishes, self._layout, self._size = wishes, layout, size
        #: Of each tensor that any member wants, the bytes that the member holds which wants most.
        self._costs = {
            number: math.ceil(wishes.cases[case].cost * layout(number).nbytes)
            for number, case in enumerate(wishes.case_of)
            if case >= 0
        }

    def case(self, number: int) -> Case:
        """Return what the members want of a tensor that some of them want."""
        return self._wishes.cases[self._wishes.case_of[number]]

    def _is_whole(self, number: int) -> bool:
        """Tell whether one member reads all of what several want of a tensor."""
        return self._wishes.encrypted or number in self._wishes.in_one_piece

    def cost(self, block: Block) -> int:
        """Return the bytes of a block's tensors that the member holds which wants most of them."""
        return sum(self._costs[number] for number in block.numbers)

    def block_bytes(self, most: int) -> int:
        """Return the bytes of a block, of which ``most`` are allowed."""
        total = sum(self._costs.values())
        usual = max(self._size * _MIN_SHARE, total // _MIN_BLOCKS)
        return max(1, min(most, usual, _MOST_BYTES))

    def blocks(self, most: int) -> Iterator[Block]:
        """Yield blocks of ``most`` bytes at most, or of one longer tensor."""
        costs = self._costs
        return map(self._block, in_batches(costs, lambda number: aligned(costs[number]), most))

    def _block(self, numbers: Sequence[int]) -> Block:
        gathered: list[Placed] = []
        shared: dict[tuple[int, ...], list[tuple[int, Rows]]] = {}
        position, cuttable = 0, True
        for number in numbers:
            case, layout = self.case(number), self._layout(number)
            if case.of_all is not None:
                first, last = (row * layout.row_bytes for row in case.of_all)
                nbytes = last - first
                gathered.append(Placed(number, case.of_all, first, position, nbytes))
                position += aligned(nbytes)
                cuttable &= not self._is_whole(number)
            for rows in case.shared:
                shared.setdefault(rows.ranks, []).append((number, rows))
        nbytes, ends = self._ends(gathered, position, cuttable=cuttable)
        return Block(tuple(numbers), tuple(gathered), nbytes, ends, shared)

    def _ends(
        self, gathered: Sequence[Placed], nbytes: int, *, cuttable: bool
    ) -> tuple[int, tuple[int, ...]]:
        """Return the length of a block's memory, and where the share of each member ends."""
        size = self._size
        if cuttable:
            each = aligned(-(-nbytes // size))
            if each >= _SMALLEST_SHARE:
                nbytes = size * each
            else:
                # Of few bytes, not all members read some.
                each = _SMALLEST_SHARE
            return nbytes, tuple(min((share + 1) * each, nbytes) for share in range(size))
        cuts = [0, *(one.start for one in gathered), nbytes]
        ends = [0]
        for share in range(1, size):
            wanted = share * nbytes // size
            at = bisect.bisect_left(cuts, wanted)
            below, above = cuts[max(at - 1, 0)], cuts[at]
            ends.append(max(ends[-1], below if wanted - below < above - wanted else above))
        return nbytes, (*ends[1:], nbytes)

    # Rows that some members want

    def pieces(self, block: Block, ranks: tuple[int, ...]) -> list[list[Piece]]:
        """Return what each of the members that want the same rows reads of them, by their order."""
        shared = block.shared[ranks]
        sizes = [(rows.stop - rows.start) * self._layout(one).row_bytes for one, rows in shared]
        total, count = sum(sizes), len(ranks)
        ends = [total * share // count for share in range(1, count + 1)]
        found: list[list[Piece]] = [[] for _ in ranks]
        position = 0
        for (number, rows), nbytes in zip(shared, sizes, strict=True):
            layout = self._layout(number)
            row_bytes, first = layout.row_bytes, rows.start
            share = bisect.bisect_right(ends, position)
            while first < rows.stop and share < count:
                last = rows.start + -(-(ends[share] - position) // row_bytes)
                stop = rows.stop if self._is_whole(number) else min(rows.stop, last)
                if first < stop:
                    ranges = ((first, stop), *self.case(number).around)
                    found[share].append(Piece(number, with_all_dims(ranges, layout.shape)))
                first, share = max(first, stop), share + 1
            position += nbytes
        return found

    def overlaps(self, piece: Piece, rank: int) -> Iterator[Ranges]:
        """Yield the boxes of a piece that a member wants."""
        shape = self._layout(piece.number).shape
        for box in self.case(piece.number).boxes.get(rank, ()):
            both = common(piece.ranges, with_all_dims(box, shape))
            if both is not None:
                yield both


def common(one: Ranges, other: Ranges) -> Ranges | None:
    """Return the intersection of two boxes; None if it is empty."""
    ends = zip(one, other, strict=True)
    both = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in ends)
    return both if all(low < high for low, high in both) else None


def sized(box: Ranges) -> int:
    """Return the number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def aligned(size: int) -> int:
    """Return a number of bytes, after which the next tensor may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
