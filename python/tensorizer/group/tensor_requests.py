"""The tensors that members of a group want of a file: encoded in few bytes, and merged."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from ..tensors.sharding import Ranges
from .plan import Boxes

#: By kind of tensor, the range of each dimension that encloses what is wanted, without the
#: dimensions at the end that are wanted as a whole.
Table: TypeAlias = tuple[Ranges, ...]


@dataclass(frozen=True)
class RequestStructure:
    """The tensors that a member wants, as a column of numbers, and a column of their kinds.

    Tensors of one kind have cut dimensions of the same lengths, and a member wants the same ranges
    of them. Members that cut tensors alike have the same structure, with other ranges for each
    kind.
    """

    columns: torch.Tensor

    def encoded(self) -> bytes:
        """Return the structure as bytes.

        Models repeat their layers: differences from number to number, and kinds, compress to a
        percent or less.
        """
        numbers, kinds = self.columns
        steps = torch.diff(numbers, prepend=numbers.new_zeros(1))
        return zlib.compress(torch.stack([steps, kinds]).numpy().tobytes())

    @staticmethod
    def decoded(data: bytes) -> RequestStructure:
        """Return the structure of the bytes that :meth:`encoded` has made."""
        raw = bytearray(zlib.decompress(data))
        if not raw:
            return TensorRequest.of([]).structure
        steps, kinds = torch.frombuffer(raw, dtype=torch.int64).view(2, -1)
        return RequestStructure(torch.stack([steps.cumsum(0), kinds]))

    def digest(self) -> bytes:
        """Return a digest that tells the structure from others."""
        return hashlib.sha256(self.columns.numpy().tobytes()).digest()


@dataclass(frozen=True)
class TensorRequest:
    """The tensors that a member wants, each with the ranges that enclose what it wants."""

    structure: RequestStructure
    table: Table

    @staticmethod
    def of(wanted: Iterable[tuple[int, Ranges, Sequence[int]]]) -> TensorRequest:
        """Return the request for tensors, given in rising order as number, ranges and shape."""
        kinds: dict[tuple[Ranges, tuple[int, ...]], int] = {}
        numbers, kind_of = [], []
        for number, ranges, shape in wanted:
            if all(start < stop for start, stop in ranges):
                dims = len(shape)
                while dims > 1 and ranges[dims - 1] == (0, shape[dims - 1]):
                    dims -= 1
                kind = ranges[:dims], tuple(shape[:dims])
                numbers.append(number)
                kind_of.append(kinds.setdefault(kind, len(kinds)))
        columns = torch.tensor([numbers, kind_of], dtype=torch.int64, device="cpu")
        return TensorRequest(RequestStructure(columns), tuple(ranges for ranges, _ in kinds))


#: The most parts of a group that a member exchanges with: each takes connections of its own.
MAX_SUBGROUPS = 8
#: The most rows of tables that are compared to find parts: about a second of CPU time.
_MAX_COMPARED_ROWS = 1_000_000


class SharedRows(NamedTuple):
    """The rows of a tensor that some members want, and the box of each.

    Attributes:
        rows: The rows that enclose what any of them wants.
        boxes: The box that each of them wants; None if all want these rows.

    """

    rows: tuple[int, int]
    boxes: Boxes | None


#: A share of tensors that members want alike, and the ranks of these members.
_RowsOfRanks: TypeAlias = tuple[SharedRows, tuple[int, ...]]


@dataclass(frozen=True)
class MergedRequests:
    """The merged requests of all members, for one of them.

    Attributes:
        shared: By the ranks of members that want the same, or overlapping, rows of tensors: their
            share of each tensor, by number in rising order. This member is among all these ranks.
        alone: The tensors of which this member wants rows that no other one wants.
        exchanges: True if any members want the same; equal at all members.

    """

    shared: dict[tuple[int, ...], dict[int, SharedRows]]
    alone: frozenset[int]
    exchanges: bool


def merge_requests(
    requests: Sequence[tuple[RequestStructure, Sequence[tuple[int, Table]]]],
    count: int,
    in_one_piece: Sequence[int],
    member: tuple[int, int],
) -> MergedRequests:
    """Merge the requests of all members.

    As a rule, all members want the same of many tensors, or the same parts. So tensors are grouped
    by what members want of them, and each different case is merged once. If any member would share
    tensors with more than :data:`MAX_SUBGROUPS` sets of members, all members share all of them.

    Args:
        requests: Each different structure, with the ranks and tables of all members that have it.
        count: The number of tensors of the file.
        in_one_piece: Tensors that are always fetched as a whole: if several members want parts of
            one, these are shared.
        member: The rank of this member, and the number of all members.

    """
    rank, size = member
    times = torch.zeros(count, dtype=torch.int64, device="cpu")
    cases = times.clone()
    cases[torch.tensor(in_one_piece, dtype=torch.int64, device="cpu")] = 1
    mine = times[:0]
    for seed, (structure, tables) in enumerate(requests):
        numbers, kinds = structure.columns
        times[numbers] += len(tables)
        # Sums of random numbers are equal for the same kinds, and (almost surely) for no others.
        seeded = torch.Generator(device="cpu").manual_seed(seed)
        ends = (len(tables[0][1]),)
        marks = torch.randint(-(2**63), 2**63 - 1, ends, generator=seeded, device="cpu")
        cases[numbers] += marks[kinds]
        if any(of == rank for of, _ in tables):
            mine = numbers
    several = torch.nonzero(times > 1).flatten()
    alone = set(mine[times[mine] == 1].tolist())
    shared: dict[tuple[int, ...], dict[int, SharedRows]] = {}
    found, case_of = torch.unique(cases[several], return_inverse=True)
    everyone = tuple(range(size))
    if len(found) * size > _MAX_COMPARED_ROWS:
        shared[everyone] = _rows_for_all(requests, count, several)
        return MergedRequests(shared, frozenset(alone), True)
    examples = several.new_zeros(len(found)).scatter_(0, case_of, several)
    boxes = _boxes_of(requests, examples)
    one_piece = set(in_one_piece)
    of_cases = [
        _grouped_rows(of_case, example in one_piece)
        for of_case, example in zip(boxes, examples.tolist(), strict=True)
    ]
    parts = {ranks for of_case in of_cases for _, ranks in of_case if len(ranks) > 1}
    often = Counter(rank for ranks in parts for rank in ranks)
    if max(often.values(), default=0) > MAX_SUBGROUPS:
        of_cases = [[(_shared_rows(of_case, everyone), everyone)] for of_case in boxes]
    # The share of this member, by case.
    own = [next((one for one in of_case if rank in one[1]), None) for of_case in of_cases]
    for number, case in zip(several.tolist(), case_of.tolist(), strict=True):
        of_case = own[case]
        if of_case is None:
            continue
        share, ranks = of_case
        if len(ranks) == 1:
            alone.add(number)
        else:
            shared.setdefault(ranks, {})[number] = share
    return MergedRequests(dict(sorted(shared.items())), frozenset(alone), bool(parts))


def _boxes_of(
    requests: Sequence[tuple[RequestStructure, Sequence[tuple[int, Table]]]], examples: torch.Tensor
) -> list[list[tuple[Ranges, int]]]:
    """Return the boxes that members want of some tensors, each with the member's rank."""
    found: list[list[tuple[Ranges, int]]] = [[] for _ in range(len(examples))]
    for structure, tables in requests:
        numbers, kinds = structure.columns
        at = torch.searchsorted(numbers, examples).clamp(max=max(len(numbers) - 1, 0))
        here = torch.nonzero(numbers[at] == examples).flatten() if len(numbers) else at[:0]
        for case, kind in zip(here.tolist(), kinds[at[here]].tolist(), strict=True):
            found[case] += [(table[kind], rank) for rank, table in tables]
    return found


def _grouped_rows(boxes: Iterable[tuple[Ranges, int]], in_one_piece: bool) -> list[_RowsOfRanks]:
    """Group boxes whose rows overlap, or all boxes of a tensor that is in one piece."""
    made: list[tuple[int, list[tuple[Ranges, int]]]] = []
    for ranges, rank in sorted(boxes):
        start, stop = ranges[0]
        if made and (in_one_piece or start < made[-1][0]):
            high, members = made.pop()
            made.append((max(high, stop), [*members, (ranges, rank)]))
        else:
            made.append((stop, [(ranges, rank)]))
    shared = []
    for _, members in made:
        ranks = tuple(sorted(rank for _, rank in members))
        shared.append((_shared_rows(members, ranks), ranks))
    return shared


def _shared_rows(boxes: Sequence[tuple[Ranges, int]], ranks: Sequence[int]) -> SharedRows:
    """Return the common share of members of some ranks."""
    rows = [ranges[0] for ranges, _ in boxes]
    by_rank = {rank: ranges for ranges, rank in boxes}
    ends = min(start for start, _ in rows), max(stop for _, stop in rows)
    return SharedRows(ends, Boxes.from_ranges([by_rank.get(rank) for rank in ranks]))


def _rows_for_all(
    requests: Sequence[tuple[RequestStructure, Sequence[tuple[int, Table]]]],
    count: int,
    several: torch.Tensor,
) -> dict[int, SharedRows]:
    """Return the rows that enclose what any member wants, of tensors that several members want."""
    lows = torch.full((count,), torch.iinfo(torch.int64).max, dtype=torch.int64, device="cpu")
    highs = torch.full((count,), -1, dtype=torch.int64, device="cpu")
    for structure, tables in requests:
        numbers, kinds = structure.columns
        if not len(numbers):
            continue
        rows = [[ranges[0] for ranges in table] for _, table in tables]
        of_all = torch.tensor(rows, dtype=torch.int64, device="cpu")
        low, high = of_all.amin(0)[kinds, 0], of_all.amax(0)[kinds, 1]
        lows[numbers] = torch.minimum(lows[numbers], low)
        highs[numbers] = torch.maximum(highs[numbers], high)
    ends = zip(lows[several].tolist(), highs[several].tolist(), strict=True)
    return {n: SharedRows(rows, None) for n, rows in zip(several.tolist(), ends, strict=True)}
