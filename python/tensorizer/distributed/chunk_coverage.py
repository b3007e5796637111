"""Checks that chunks cover a tensor, each element exactly once."""

from __future__ import annotations

import itertools
import math

from torch.distributed.checkpoint import metadata as dcp

#: The most chunks that are compared in pairs.
_MAX_COMPARED_PAIRWISE = 1 << 10


def check(name: str, tensor: dcp.TensorStorageMetadata) -> None:
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
