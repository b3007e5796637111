"""The chunks of a tensor, which cover each of its elements exactly once.

Those of a grid follow from the offsets at which cuts are in each dimension. In their order the last
dimension varies fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

#: The most chunks that are compared in pairs.
_MAX_COMPARED_PAIRWISE = 1 << 10


def grid_of(
    size: Sequence[int], boxes: dict[tuple[int, ...], tuple[int, ...]]
) -> list[list[int]] | None:
    """Return the grid that chunks form exactly, as offsets in each dimension; None if they do not.

    Args:
        size: The shape of the tensor.
        boxes: The sizes of the chunks, by their offsets.

    """
    starts = [sorted({0, *column}) for column in zip(*boxes, strict=True)]
    if not boxes or math.prod(map(len, starts)) != len(boxes):
        return None
    return starts if dict(_boxes(size, starts)) == boxes else None


def encoded_grid(size: Sequence[int], starts: Sequence[Sequence[int]]) -> list[int | list[int]]:
    """Return, for each dimension, the step of evenly spaced cuts, or the list of all offsets."""
    found: list[int | list[int]] = []
    for cuts, length in zip(starts, size, strict=True):
        step = cuts[1] if len(cuts) > 1 else length
        found.append(step if list(cuts) == list(range(0, length, step)) else list(cuts))
    return found


def decoded_grid(size: Sequence[int], cuts: Any) -> tuple[Sequence[int], ...]:
    """Return, for each dimension, the offsets at which chunks begin.

    Raises:
        TypeError, ValueError: The metadata of the checkpoint describes no grid.

    """
    if not isinstance(cuts, list) or len(cuts) != len(size) or 0 in size:
        raise ValueError(f"expected the cuts of {list(size)} in each dimension, found {cuts!r}")
    return tuple(map(_starts, cuts, size))


def _starts(cut: Any, length: int) -> Sequence[int]:
    if type(cut) is int and 0 < cut < 1 << 63:
        return range(0, length, cut)
    if not isinstance(cut, list) or any(type(start) is not int for start in cut):
        raise ValueError(f"expected cuts of {length}, found {cut!r}")
    if cut[:1] != [0] or cut != sorted({*cut}) or cut[-1] >= length:
        raise ValueError(f"expected cuts of {length} that ascend, found {cut!r}")
    return tuple(cut)


def of_grid(size: Sequence[int], starts: Sequence[Sequence[int]]) -> list[dcp.ChunkStorageMetadata]:
    """Return the chunks of a grid, in their order."""
    return [
        dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
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


def check_coverage(name: str, tensor: dcp.TensorStorageMetadata) -> None:
    """Raise ``ValueError`` unless the chunks cover each element of a tensor exactly once."""
    for chunk in tensor.chunks:
        ends = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        if any(offset + length > whole for offset, length, whole in ends):
            raise ValueError(f"a chunk of {name!r} lies outside of it: {chunk}")
    if len({chunk.offsets for chunk in tensor.chunks}) != len(tensor.chunks):
        raise ValueError(f"two chunks of {name!r} begin at the same place")
    found, expected = sum(math.prod(one.sizes) for one in tensor.chunks), math.prod(tensor.size)
    if found != expected:
        raise ValueError(
            f"the chunks of {name!r} have {found} elements together, and the tensor has {expected}"
        )
    if not _are_disjoint([one for one in tensor.chunks if 0 not in one.sizes]):
        raise ValueError(f"chunks of {name!r} overlap, or are too many to rule that out")


def _are_disjoint(chunks: list[dcp.ChunkStorageMetadata]) -> bool:
    """Tell whether no two chunks have elements in common.

    They are split in one dimension after another, at places that no chunk crosses. Chunks that
    cannot be split, which a grid never has, are compared in pairs.
    """
    if len(chunks) < 2:
        return True
    for dim in range(len(chunks[0].offsets)):
        groups: list[list[dcp.ChunkStorageMetadata]] = []
        end = 0
        for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
            if not groups or chunk.offsets[dim] >= end:
                groups.append([])
            groups[-1].append(chunk)
            end = max(end, chunk.offsets[dim] + chunk.sizes[dim])
        if len(groups) > 1:
            return all(map(_are_disjoint, groups))
    if len(chunks) > _MAX_COMPARED_PAIRWISE:
        return False
    return not any(itertools.starmap(_overlap, itertools.combinations(chunks, 2)))


def _overlap(one: dcp.ChunkStorageMetadata, other: dcp.ChunkStorageMetadata) -> bool:
    ends = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + many and b < a + much for a, much, b, many in ends)
