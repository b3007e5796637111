"""The wishes of the members of a group: encoded in few bytes, and compared."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from ..tensors.sharding import Ranges

#: Bytes of a contiguous run in a file from which on its only member reads it by itself.
_MIN_LONG_RUN = 1 << 20
#: The most boxes of members that are compared one by one: about a second of CPU time.
_MAX_COMPARED_BOXES = 1_000_000


class Kind(NamedTuple):
    """A way to cut tensors: tensors of one kind are cut alike.

    Attributes:
        boxes: The boxes of a tensor that a member wants, without the dimensions at the end that it
            wants as a whole.
        shape: The lengths of these dimensions.
        unit: Bytes of one index in all of them; 0 if boxes have one dimension, as it need not be
            known then.

    """

    boxes: tuple[Ranges, ...]
    shape: tuple[int, ...]
    unit: int


#: The kinds of a member's tensors, by number.
Table: TypeAlias = tuple[Kind, ...]
#: The different columns, each with the ranks and tables of all members that have them.
_Wishes: TypeAlias = Sequence[tuple[torch.Tensor, Sequence[tuple[int, Table]]]]


@dataclass(frozen=True)
class Wish:
    """The tensors that a member wants.

    Attributes:
        columns: The numbers of the tensors in rising order, and the number of the kind of each.
            Members that cut the same tensors alike have the same columns, with other boxes in their
            tables.
        table: The kinds.

    """

    columns: torch.Tensor
    table: Table

    @staticmethod
    def of(wanted: Iterable[tuple[int, Sequence[Ranges], Sequence[int], int]]) -> Wish:
        """Return the wish for tensors, given in rising order.

        Each is given as number, boxes, shape, and bytes of an element. Tensors of which nothing is
        wanted are left out.
        """
        kinds: dict[Kind, int] = {}
        numbers, kind_of = [], []
        for number, boxes, shape, itemsize in wanted:
            kind = _kind(tuple(boxes), tuple(shape), itemsize)
            if kind is not None:
                numbers.append(number)
                kind_of.append(kinds.setdefault(kind, len(kinds)))
        columns = torch.tensor([numbers, kind_of], dtype=torch.int64, device="cpu")
        return Wish(columns, tuple(kinds))

    def digest(self) -> bytes:
        """Return a digest of the columns, which tells them from others."""
        return hashlib.sha256(self.columns.numpy().tobytes()).digest()

    def encoded_table(self) -> bytes:
        """Return the table as bytes."""
        return zlib.compress(pickle.dumps(self.table))

    def encoded(self) -> bytes:
        """Return the columns as bytes.

        Models repeat their layers: differences from number to number, and kinds, compress to a
        percent or less.
        """
        numbers, kinds = self.columns
        steps = torch.diff(numbers, prepend=numbers.new_zeros(1))
        return zlib.compress(torch.stack([steps, kinds]).numpy().tobytes())


# As a rule, many tensors are wanted alike.
@functools.lru_cache(maxsize=1024)
def _kind(boxes: Sequence[Ranges], shape: Sequence[int], itemsize: int) -> Kind | None:
    """Return the kind of a tensor; None if nothing is wanted of it."""
    some = [box for box in boxes if all(start < stop for start, stop in box)]
    dims = max(len(shape), 1)
    while dims > 1 and all(box[dims - 1] == (0, shape[dims - 1]) for box in some):
        dims -= 1
    unit = math.prod(shape[dims:]) * itemsize if dims > 1 else 0
    return Kind(tuple(box[:dims] for box in some), tuple(shape[:dims]), unit) if some else None


def decoded_table(data: bytes) -> Table:
    """Return the table of the bytes that :meth:`Wish.encoded_table` has made."""
    table: Table = pickle.loads(zlib.decompress(data))
    return table


def decoded_columns(data: bytes) -> torch.Tensor:
    """Return the columns of the bytes that :meth:`Wish.encoded` has made."""
    raw = bytearray(zlib.decompress(data))
    if not raw:
        return Wish.of([]).columns
    steps, kinds = torch.frombuffer(raw, dtype=torch.int64).view(2, -1)
    return torch.stack([steps.cumsum(0), kinds])


class Rows(NamedTuple):
    """Indices of the first dimension of a tensor, and the ranks of the members that want some."""

    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """The parts that all members want of tensors that they cut alike.

    Attributes:
        of_all: The rows that all members want, all of them with all columns; None if they want
            different parts.
        shared: Rows of which several members want something. Empty if each member reads its own
            part.
        around: The range of each further dimension that encloses what is wanted of these rows.
        boxes: The boxes that each member wants, by rank.
        cost: The most that a member holds of the tensor, as a share of it: what it wants, and what
            it reads for others and sends them.

    """

    of_all: tuple[int, int] | None
    shared: tuple[Rows, ...]
    around: Ranges
    boxes: Mapping[int, tuple[Ranges, ...]]
    cost: float


@dataclass(frozen=True)
class MergedWishes:
    """The wishes of all members.

    Attributes:
        cases: The different cases.
        case_of: The number of the case of each tensor of the file; -1 if no member wants any of it.
        in_one_piece: Tensors that are read as a whole if several members want parts of them.
        encrypted: True if the file is encrypted. Then the bytes of a tensor are decrypted together.

    """

    cases: list[Case]
    case_of: list[int]
    in_one_piece: frozenset[int]
    encrypted: bool


def merged(
    wishes: _Wishes, count: int, size: int, in_one_piece: Iterable[int], *, encrypted: bool
) -> MergedWishes:
    """Merge the wishes of all members.

    As a rule, all members want the same of many tensors, or the same parts. So each different case
    is compared once.

    Args:
        wishes: The different columns, each with the ranks and tables of all members that have them.
        count: The number of tensors of the file.
        size: The number of members.
        in_one_piece: See :class:`MergedWishes`.
        encrypted: The same.

    """
    marks = torch.zeros(count, dtype=torch.int64, device="cpu")
    wanted = torch.zeros(count, dtype=torch.bool, device="cpu")
    for seed, (columns, tables) in enumerate(wishes):
        numbers, kinds = columns
        wanted[numbers] = True
        # Sums of random numbers are equal for the same kinds, and (almost surely) for no others.
        seeded = torch.Generator(device="cpu").manual_seed(seed)
        ends = (len(tables[0][1]),)
        random = torch.randint(-(2**63), 2**63 - 1, ends, generator=seeded, device="cpu")
        marks[numbers] += random[kinds]
    whole = frozenset(in_one_piece)
    marks[torch.tensor(sorted(whole), dtype=torch.int64, device="cpu")] += 1
    some = torch.nonzero(wanted).flatten()
    found, which = torch.unique(marks[some], return_inverse=True)
    case_of = torch.full((count,), -1, dtype=torch.int64, device="cpu")
    case_of[some] = which
    examples = some.new_zeros(len(found)).scatter_(0, which, some)
    many = len(found) * size > _MAX_COMPARED_BOXES
    kinds_of = _kinds_of(wishes, examples)
    cases = [
        _case(kinds, size, in_one_piece=example in whole, encrypted=encrypted, many=many)
        for kinds, example in zip(kinds_of, examples.tolist(), strict=True)
    ]
    return MergedWishes(cases, case_of.tolist(), whole, encrypted)


def _kinds_of(wishes: _Wishes, examples: torch.Tensor) -> list[dict[int, Kind]]:
    """Return what members want of some tensors, by rank."""
    found: list[dict[int, Kind]] = [{} for _ in range(len(examples))]
    for (numbers, kinds), tables in wishes:
        at = torch.searchsorted(numbers, examples).clamp(max=max(len(numbers) - 1, 0))
        here = torch.nonzero(numbers[at] == examples).flatten() if len(numbers) else at[:0]
        for case, kind in zip(here.tolist(), kinds[at[here]].tolist(), strict=True):
            found[case].update((rank, table[kind]) for rank, table in tables)
    return found


def _case(
    kinds: Mapping[int, Kind], size: int, *, in_one_piece: bool, encrypted: bool, many: bool
) -> Case:
    """Compare what members want of a tensor."""
    boxes = {rank: kinds[rank].boxes for rank in sorted(kinds)}
    cost = max(map(_share, kinds.values()))
    shape = max((kind.shape for kind in kinds.values()), key=len)
    every = [with_all_dims(box, shape) for of_rank in boxes.values() for box in of_rank]
    rows, *around = (
        (min(start for start, _ in ends), max(stop for _, stop in ends))
        for ends in zip(*every, strict=True)
    )
    same = len(set(boxes.values())) == 1
    of_all = len(boxes) == len(every) == size and same and not around
    if of_all and (rows == (0, shape[0]) or not (in_one_piece or encrypted)):
        return Case(rows, (), (), boxes, cost)
    if len(boxes) == 1 or not (in_one_piece or same or many or not _are_apart(kinds, every)):
        return Case(None, (), (), boxes, cost)
    if in_one_piece:
        # One member holds it, and what each of the others wants of it.
        cost = 1 + sum(map(_share, kinds.values()))
        return Case(None, (Rows(0, shape[0], tuple(boxes)),), (), boxes, cost)
    # It reads as much for others as it wants, or less.
    cost *= 2
    if same or many:
        return Case(None, (Rows(*rows, tuple(boxes)),), tuple(around), boxes, cost)
    cuts = sorted({end for box in every for end in box[0]})
    ranks_of: list[dict[int, None]] = [{} for _ in cuts]
    for rank, of_rank in boxes.items():
        for (start, stop), *_ in of_rank:
            for at in range(bisect.bisect_left(cuts, start), bisect.bisect_left(cuts, stop)):
                ranks_of[at][rank] = None
    shared = [
        Rows(start, stop, tuple(ranks))
        for (start, stop), ranks in zip(itertools.pairwise(cuts), ranks_of[:-1], strict=True)
        if ranks
    ]
    return Case(None, tuple(shared), tuple(around), boxes, cost)


def _share(kind: Kind) -> float:
    """Return what share of a tensor a member wants."""
    sizes = (math.prod(stop - start for start, stop in box) for box in kind.boxes)
    return sum(sizes) / math.prod(kind.shape)


def _are_apart(kinds: Mapping[int, Kind], boxes: Sequence[Ranges]) -> bool:
    """Tell whether no two boxes overlap, and each member has what it wants in long runs."""
    for kind in kinds.values():
        for box in kind.boxes:
            if len(box) > 1 and (box[-1][1] - box[-1][0]) * kind.unit < _MIN_LONG_RUN:
                return False
    # As a rule, boxes differ in one dimension. Where they differ in more, the members share them.
    different = [ends for ends in zip(*boxes, strict=True) if len(set(ends)) > 1]
    if len(different) != 1:
        return False
    return all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(different[0])))


def with_all_dims(box: Ranges, shape: Sequence[int]) -> Ranges:
    """Return a box with a range for every dimension."""
    return (*box, *((0, size) for size in shape[len(box) :]))
