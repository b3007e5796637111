"""The tensors that members of a group want of a file: in few bytes to send, and merged."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

#: First rows and ends, by kind of tensor.
Table = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Structure:
    """The tensors that a member wants, as a column of numbers, and a column of their kinds.

    Of tensors of one kind, which have as many rows each, a member wants the same rows. Members that
    cut tensors alike have the same structure, with other rows for each kind.
    """

    columns: torch.Tensor

    def encoded(self) -> bytes:
        """Return it as bytes.

        Models repeat their layers: differences from number to number, and kinds, compress to a
        percent or less.
        """
        numbers, kinds = self.columns
        steps = torch.diff(numbers, prepend=numbers.new_zeros(1))
        return zlib.compress(torch.stack([steps, kinds]).numpy().tobytes())

    @staticmethod
    def decoded(data: bytes) -> Structure:
        """Return what :meth:`encoded` has made bytes of."""
        raw = bytearray(zlib.decompress(data))
        if not raw:
            return Wish.of([]).structure
        steps, kinds = torch.frombuffer(raw, dtype=torch.int64).view(2, -1)
        return Structure(torch.stack([steps.cumsum(0), kinds]))

    def digest(self) -> bytes:
        """Return what tells it from other structures."""
        return hashlib.sha256(self.columns.numpy().tobytes()).digest()


@dataclass(frozen=True)
class Wish:
    """The tensors that a member wants, and of each the rows that hold what it wants."""

    structure: Structure
    table: Table

    @staticmethod
    def of(wanted: Iterable[tuple[int, int, int, int]]) -> Wish:
        """Return the wish for tensors, given in rising order as number, first row, end, and rows
        of the whole tensor.
        """  # noqa: D205
        kinds: dict[tuple[int, int, int], int] = {}
        numbers, kind_of = [], []
        for number, start, stop, rows in wanted:
            if start < stop:
                numbers.append(number)
                kind_of.append(kinds.setdefault((start, stop, rows), len(kinds)))
        columns = torch.tensor([numbers, kind_of], dtype=torch.int64, device="cpu")
        return Wish(Structure(columns), tuple((start, stop) for start, stop, _ in kinds))


#: The most parts of a group that a member exchanges with: each takes connections of its own.
MOST_PARTS = 8
#: The most rows of tables that are compared for parts: about a second of CPU.
_MOST_COMPARED = 1_000_000

#: Of a tensor, or of others that members want alike: the rows that hold what some members want, and
#: the ranks of these.
_Range = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class Merged:
    """The wants of all members together, as they concern one of them.

    Attributes:
        shared: By the ranks of those that want the same, or overlapping, rows of tensors: for each
            tensor, by number in rising order, the rows that hold what any of these wants. This
            member is one of each of them.
        alone: The tensors of which this member wants rows that no other one wants.
        exchanges: Whether any members want the same, which is told alike to all of them.

    """

    shared: dict[tuple[int, ...], dict[int, tuple[int, int]]]
    alone: frozenset[int]
    exchanges: bool


def merged(
    wishes: Sequence[tuple[Structure, Sequence[tuple[int, Table]]]],
    count: int,
    in_one_piece: Sequence[int],
    member: tuple[int, int],
) -> Merged:
    """Merge the wishes of all members.

    All members want the same of many tensors, or the same parts: tensors are compared by what
    members want of them, each different case once. A member that wanted something together with
    more than :data:`MOST_PARTS` others sets of members shares with all of them instead.

    Args:
        wishes: Each structure once, with the ranks and tables of all members that have it.
        count: The number of tensors of the file.
        in_one_piece: Tensors that are always fetched as a whole: if several members want parts of
            one, these are shared.
        member: The rank of this one, and the number of all.

    """
    rank, size = member
    times = torch.zeros(count, dtype=torch.int64, device="cpu")
    cases = times.clone()
    cases[torch.tensor(in_one_piece, dtype=torch.int64, device="cpu")] = 1
    mine = times[:0]
    for seed, (structure, tables) in enumerate(wishes):
        numbers, kinds = structure.columns
        times[numbers] += len(tables)
        # Sums of random numbers are the same for the same kinds, and for no others.
        seeded = torch.Generator(device="cpu").manual_seed(seed)
        ends = (len(tables[0][1]),)
        marks = torch.randint(-(2**63), 2**63 - 1, ends, generator=seeded, device="cpu")
        cases[numbers] += marks[kinds]
        if any(of == rank for of, _ in tables):
            mine = numbers
    several = torch.nonzero(times > 1).flatten()
    alone = set(mine[times[mine] == 1].tolist())
    shared: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {}
    found, case_of = torch.unique(cases[several], return_inverse=True)
    examples = several.new_zeros(len(found)).scatter_(0, case_of, several)
    ranges: list[list[_Range]] = []
    parts: set[tuple[int, ...]] = set()
    few = len(found) * size <= _MOST_COMPARED
    if few:
        one_piece = set(in_one_piece)
        rows = zip(_rows(wishes, examples), examples.tolist(), strict=True)
        ranges = [_ranges(of_case, example in one_piece) for of_case, example in rows]
        parts = {ranks for of_case in ranges for *_, ranks in of_case if len(ranks) > 1}
    often = Counter(rank for ranks in parts for rank in ranks)
    if not few or max(often.values(), default=0) > MOST_PARTS:
        everyone = tuple(range(size))
        shared[everyone] = _by_all(wishes, count, several)
        return Merged(shared, frozenset(alone), True)
    # By case the range that has this member.
    own = [next((one for one in of_case if rank in one[2]), None) for of_case in ranges]
    for number, case in zip(several.tolist(), case_of.tolist(), strict=True):
        of_case = own[case]
        if of_case is None:
            continue
        start, stop, ranks = of_case
        if len(ranks) == 1:
            alone.add(number)
        else:
            shared.setdefault(ranks, {})[number] = (start, stop)
    return Merged(dict(sorted(shared.items())), frozenset(alone), bool(parts))


def _rows(
    wishes: Sequence[tuple[Structure, Sequence[tuple[int, Table]]]], examples: torch.Tensor
) -> list[list[tuple[int, int, int]]]:
    """Return the rows that members want of some tensors: first, end, and the rank."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(len(examples))]
    for structure, tables in wishes:
        numbers, kinds = structure.columns
        at = torch.searchsorted(numbers, examples).clamp(max=max(len(numbers) - 1, 0))
        here = torch.nonzero(numbers[at] == examples).flatten() if len(numbers) else at[:0]
        for case, kind in zip(here.tolist(), kinds[at[here]].tolist(), strict=True):
            found[case] += [(*table[kind], rank) for rank, table in tables]
    return found


def _ranges(rows: Iterable[tuple[int, int, int]], in_one_piece: bool) -> list[_Range]:
    """Put rows together that overlap, or all that are in one piece."""
    made: list[tuple[int, int, list[int]]] = []
    for start, stop, rank in sorted(rows):
        if made and (in_one_piece or start < made[-1][1]):
            low, high, ranks = made.pop()
            made.append((low, max(high, stop), [*ranks, rank]))
        else:
            made.append((start, stop, [rank]))
    return [(start, stop, tuple(sorted(ranks))) for start, stop, ranks in made]


def _by_all(
    wishes: Sequence[tuple[Structure, Sequence[tuple[int, Table]]]],
    count: int,
    several: torch.Tensor,
) -> dict[int, tuple[int, int]]:
    """Return the range that holds what any member wants, of tensors that several want."""
    lows = torch.full((count,), torch.iinfo(torch.int64).max, dtype=torch.int64, device="cpu")
    highs = torch.full((count,), -1, dtype=torch.int64, device="cpu")
    for structure, tables in wishes:
        numbers, kinds = structure.columns
        if not len(numbers):
            continue
        of_all = torch.tensor([table for _, table in tables], dtype=torch.int64, device="cpu")
        low, high = of_all.amin(0)[kinds, 0], of_all.amax(0)[kinds, 1]
        lows[numbers] = torch.minimum(lows[numbers], low)
        highs[numbers] = torch.maximum(highs[numbers], high)
    rows = zip(lows[several].tolist(), highs[several].tolist(), strict=True)
    return dict(zip(several.tolist(), rows, strict=True))
