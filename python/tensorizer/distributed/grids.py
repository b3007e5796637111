"""Tensors cut in a grid: their chunks follow from the cuts in each dimension."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

#: The exclusive upper bound of lengths and offsets.
_MOST = 1 << 63


@dataclass(frozen=True)
class Grid:
    """The cuts of a tensor; in the order of its chunks, the last dimension varies fastest.

    Attributes:
        size: The shape of the tensor.
        starts: For each dimension, the offsets at which chunks begin.

    """

    size: torch.Size
    starts: tuple[Sequence[int], ...]

    @property
    def count(self) -> int:
        """The number of chunks."""
        return math.prod(map(len, self.starts))

    def encoded(self) -> list[int | list[int]]:
        """Return, for each dimension, the step of evenly spaced cuts, or the list of all starts."""
        found: list[int | list[int]] = []
        for starts, length in zip(self.starts, self.size, strict=True):
            step = starts[1] if len(starts) > 1 else length
            even = list(starts) == list(range(0, length, step))
            found.append(step if even else list(starts))
        return found

    def chunks(self) -> list[dcp.ChunkStorageMetadata]:
        """Return the chunks, in their order."""
        boxes = zip(itertools.product(*self.starts), self._sizes(), strict=True)
        # Most chunks have the same sizes; equal sizes share one object.
        shapes: dict[tuple[int, ...], torch.Size] = {}
        return [
            dcp.ChunkStorageMetadata(
                torch.Size(offsets),
                shapes.get(sizes) or shapes.setdefault(sizes, torch.Size(sizes)),
            )
            for offsets, sizes in boxes
        ]

    def _sizes(self) -> Iterable[tuple[int, ...]]:
        return itertools.product(*map(_lengths, self.starts, self.size))

    def find(self, offsets: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
        """Return the index and the sizes of the chunk that begins there; None if none does."""
        number, sizes = 0, []
        for starts, length, offset in zip(self.starts, self.size, offsets, strict=True):
            at = bisect_left(starts, offset)
            if at == len(starts) or starts[at] != offset:
                return None
            number = number * len(starts) + at
            sizes.append((starts[at + 1] if at + 1 < len(starts) else length) - offset)
        return number, tuple(sizes)


def _lengths(starts: Sequence[int], length: int) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise([*starts, length])]


def of_chunks(size: Sequence[int], boxes: dict[tuple[int, ...], tuple[int, ...]]) -> Grid | None:
    """Return the grid that these chunks form exactly; None if they form none.

    Args:
        size: The shape of the tensor.
        boxes: The sizes of the chunks, by their offsets.

    """
    if not boxes or 0 in size or any(len(offsets) != len(size) for offsets in boxes):
        return None
    starts = tuple(sorted(set(column)) for column in zip(*boxes, strict=True))
    if math.prod(map(len, starts)) != len(boxes):
        return None
    # There are as many chunks as cells, at different offsets: with offset 0 and equal sizes they
    # are exactly the cells of the grid.
    if any(first != 0 for first, *_ in starts):
        return None
    grid = Grid(torch.Size(size), starts)
    expected = zip(itertools.product(*starts), grid._sizes(), strict=True)
    if any(boxes[offsets] != sizes for offsets, sizes in expected):
        return None
    return grid


def decoded(size: torch.Size, cuts: Any) -> Grid:
    """Return the grid that the metadata of a checkpoint describes.

    Raises:
        TypeError, ValueError: It describes none.

    """
    if not isinstance(cuts, list) or len(cuts) != len(size) or 0 in size:
        raise ValueError(f"expected the cuts of {list(size)} in each dimension, found {cuts!r}")
    return Grid(size, tuple(map(_starts, cuts, size)))


def _starts(cut: Any, length: int) -> Sequence[int]:
    if type(cut) is int and 0 < cut < _MOST:
        return range(0, length, cut)
    whole = isinstance(cut, list) and cut and all(type(one) is int for one in cut)
    if not whole or cut[0] != 0 or cut[-1] >= length:
        raise ValueError(f"expected cuts of {length}, found {cut!r}")
    if any(start >= stop for start, stop in itertools.pairwise(cut)):
        raise ValueError(f"expected cuts of {length} that ascend, found {cut!r}")
    found: list[int] = cut
    return found
