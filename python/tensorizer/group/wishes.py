"""The tensors that members of a group want of a file: in few bytes to send, and merged."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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


@dataclass(frozen=True)
class Merged:
    """The wants of all members together.

    Attributes:
        shared: By number the rows of each tensor of which several members want the same ones, in
            rising order: the range that holds what any member wants.
        alone: The tensors of which each member wants other rows, or which one member wants.

    """

    shared: dict[int, tuple[int, int]]
    alone: frozenset[int]


def merged(
    wishes: Iterable[tuple[Structure, Sequence[Table]]], count: int, in_one_piece: Sequence[int]
) -> Merged:
    """Merge the wishes of all members.

    Args:
        wishes: Each structure once, with the tables of all members that have it.
        count: The number of tensors of the file.
        in_one_piece: Tensors that are always fetched as a whole: if several members want parts of
            one, these are shared.

    """
    lows = torch.full((count,), torch.iinfo(torch.int64).max, dtype=torch.int64, device="cpu")
    highs = torch.full((count,), -1, dtype=torch.int64, device="cpu")
    shared = torch.zeros(count, dtype=torch.bool, device="cpu")
    whole = shared.clone()
    whole[torch.tensor(in_one_piece, dtype=torch.int64, device="cpu")] = True
    for structure, tables in wishes:
        numbers, kinds = structure.columns
        merged_kinds = [_together(of_kind) for of_kind in zip(*tables, strict=True)]
        of_kinds = torch.tensor(merged_kinds, dtype=torch.int64, device="cpu").view(-1, 3)
        low, high, overlap = of_kinds[kinds].unbind(1)
        known_low, known_high = lows[numbers], highs[numbers]
        # Rows in a gap between others are taken for shared, too.
        apart = (low >= known_high) | (high <= known_low)
        several = (known_high >= 0) | (len(tables) > 1)
        shared[numbers] |= ~apart | (overlap != 0) | (whole[numbers] & several)
        lows[numbers] = torch.minimum(known_low, low)
        highs[numbers] = torch.maximum(known_high, high)
    both = torch.nonzero(shared).flatten()
    rows = zip(both.tolist(), lows[both].tolist(), highs[both].tolist(), strict=True)
    alone = torch.nonzero(~shared & (highs >= 0)).flatten()
    return Merged(
        {number: (start, stop) for number, start, stop in rows}, frozenset(alone.tolist())
    )


def _together(ranges: Iterable[tuple[int, int]]) -> tuple[int, int, int]:
    """Return the range that holds some others, and 1 if any of these overlap."""
    ordered = sorted(ranges)
    overlap = any(stop > start for (_, stop), (start, _) in pairwise(ordered))
    return ordered[0][0], max(stop for _, stop in ordered), int(overlap)
