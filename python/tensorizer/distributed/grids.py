"""Tensors cut in a grid: their chunks follow from the offsets at which cuts are, by dimension.

In the order of the chunks, the last dimension varies fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp


def of_chunks(
    size: Sequence[int], boxes: dict[tuple[int, ...], tuple[int, ...]]
) -> list[list[int]] | None:
    """Return, for each dimension, the offsets of the grid that these chunks form exactly.

    Args:
        size: The shape of the tensor.
        boxes: The sizes of the chunks, by their offsets. None is returned if they form no grid.

    """
    starts = [sorted({0, *column}) for column in zip(*boxes, strict=True)]
    if not boxes or math.prod(map(len, starts)) != len(boxes):
        return None
    return starts if dict(_boxes(size, starts)) == boxes else None


def encoded(size: Sequence[int], starts: Sequence[Sequence[int]]) -> list[int | list[int]]:
    """Return, for each dimension, the step of evenly spaced cuts, or the list of all offsets."""
    found: list[int | list[int]] = []
    for cuts, length in zip(starts, size, strict=True):
        step = cuts[1] if len(cuts) > 1 else length
        found.append(step if list(cuts) == list(range(0, length, step)) else list(cuts))
    return found


def decoded(size: Sequence[int], cuts: Any) -> list[Sequence[int]]:
    """Return, for each dimension, the offsets at which chunks begin.

    Raises:
        TypeError, ValueError: The metadata of the checkpoint describes no grid.

    """
    if not isinstance(cuts, list) or len(cuts) != len(size) or 0 in size:
        raise ValueError(f"expected the cuts of {list(size)} in each dimension, found {cuts!r}")
    return list(map(_starts, cuts, size))


def _starts(cut: Any, length: int) -> Sequence[int]:
    if type(cut) is int and 0 < cut < 1 << 63:
        return range(0, length, cut)
    if not isinstance(cut, list) or any(type(start) is not int for start in cut):
        raise ValueError(f"expected cuts of {length}, found {cut!r}")
    if cut[:1] != [0] or cut != sorted({*cut}) or cut[-1] >= length:
        raise ValueError(f"expected cuts of {length} that ascend, found {cut!r}")
    return cut


def chunks(size: Sequence[int], starts: Sequence[Sequence[int]]) -> list[dcp.ChunkStorageMetadata]:
    """Return the chunks of a grid, in their order."""
    # Most chunks have the same sizes; equal sizes share one object.
    shapes: dict[tuple[int, ...], torch.Size] = {}
    return [
        dcp.ChunkStorageMetadata(
            torch.Size(offsets), shapes.get(sizes) or shapes.setdefault(sizes, torch.Size(sizes))
        )
        for offsets, sizes in _boxes(size, starts)
    ]


def _boxes(
    size: Sequence[int], starts: Sequence[Sequence[int]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the offsets and sizes of the chunks."""
    lengths = [
        [stop - start for start, stop in itertools.pairwise([*cuts, length])]
        for cuts, length in zip(starts, size, strict=True)
    ]
    return zip(itertools.product(*starts), itertools.product(*lengths), strict=True)
