"""The part of a tensor that a process has: of DTensors, and of tensors cut among ranks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch

from .._types import Name

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: The first index and the end in each dimension.
Ranges: TypeAlias = tuple[tuple[int, int], ...]
#: Ranges of one dimension, in the order in which a process has them.
_Runs: TypeAlias = list[tuple[int, int]]


@dataclass(frozen=True)
class Box:
    """A range of each dimension of a tensor, and the position of these elements in the part."""

    ranges: Ranges
    at: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions of the box."""
        return tuple(stop - start for start, stop in self.ranges)

    def of_part(self, part: torch.Tensor) -> torch.Tensor:
        """Return the box's elements in a tensor that is the part."""
        for dim, (start, size) in enumerate(zip(self.at, self.shape, strict=True)):
            part = part.narrow(dim, start, size)
        return part

    def of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the box's elements in a tensor that is the whole."""
        return whole[tuple(slice(*ends) for ends in self.ranges)]


@dataclass(frozen=True)
class Part:
    """The elements of a tensor that a process has: one box, or several that are joined."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @staticmethod
    def of_ranges(ranges: Iterable[tuple[int, int]]) -> Part:
        """Return the part that consists of one box."""
        ends = tuple(ranges)
        box = Box(ends, (0,) * len(ends))
        return Part(box.shape, (box,))

    @staticmethod
    def _of_runs(runs: Sequence[_Runs]) -> Part:
        """Return the part that has these ranges in each dimension."""
        placed = []
        for of_dim in runs:
            starts = itertools.accumulate((stop - start for start, stop in of_dim), initial=0)
            placed.append(list(zip(of_dim, starts, strict=False)))
        boxes = [
            Box(tuple(ends for ends, _ in chosen), tuple(at for _, at in chosen))
            for chosen in itertools.product(*placed)
        ]
        return Part(tuple(map(_length, runs)), tuple(boxes))


@dataclass(frozen=True)
class Shard:
    """The division of tensors among ranks that do not use DTensors.

    Rank ``rank`` gets the part with this number of ``torch.chunk(tensor, world, dim)``: if the
    dimension is not a multiple of ``world``, the last ranks get a smaller part, or none.

    Args:
        dim: The dimension that is cut, as a number for all tensors, or as a function of a tensor's
            name. The function returns None for a tensor that every rank gets as a whole.
        rank: The number of the part, from 0 on.
        world: The number of parts.

    Raises:
        ValueError: ``rank`` is not from 0 to ``world - 1``.

    """

    dim: int | Callable[[Name], int | None] | None
    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world}: expected 0 to {self.world - 1}")

    def part(self, name: Name, shape: Sequence[int]) -> Part | None:
        """Return the part of a tensor; None for all of it.

        Raises:
            IndexError: The tensor has no such dimension.

        """
        dim = self.dim(name) if callable(self.dim) else self.dim
        if dim is None:
            return None
        if not -len(shape) <= dim < len(shape):
            raise IndexError(f"dimension {dim} of tensor {name!r}, which has {len(shape)}")
        runs: list[_Runs] = [[(0, size)] for size in shape]
        runs[dim] = _chunk(runs[dim], self.world, self.rank)
        return Part._of_runs(runs)


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Tell whether a tensor is a DTensor."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def are_any_sharded(tensors: Iterable[object]) -> bool:
    """Tell whether one of them is a DTensor."""
    return "torch.distributed.tensor" in sys.modules and any(map(is_sharded, tensors))


def part_of(tensor: Any) -> Part | None:
    """Return the part of a DTensor that this process has; None for all of it.

    Raises:
        NotImplementedError: Its elements are partial sums over ranks, or its placement is unknown.

    """
    # Slow to import; code with DTensors has imported it already.
    from torch.distributed.tensor import placement_types as kinds

    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Part((0,), ())
    for placement in tensor.placements:
        if not isinstance(placement, (kinds.Replicate, kinds.Shard, kinds._StridedShard)):
            raise NotImplementedError(
                f"a DTensor that is {placement} over a dimension of its mesh cannot be loaded: "
                "expected Shard or Replicate"
            )
    found = tuple(local_of(tensor).shape)
    cut = [d for d, p in enumerate(tensor.placements) if not isinstance(p, kinds.Replicate)]
    strided = [d for d in cut if isinstance(tensor.placements[d], kinds._StridedShard)]
    # torch calls FSDP2's shards of tensors that tensor parallelism has cut before strided. There
    # are two ways to cut those, which differ only if a part is longer than one before it: both are
    # tried.
    orders: Any = (cut, strided), ([*(d for d in cut if d not in strided), *reversed(strided)], [])
    for order, in_pieces in orders:
        runs: list[_Runs] = [[(0, size)] for size in tensor.shape]
        for mesh_dim in order:
            placement = tensor.placements[mesh_dim]
            pieces = placement.split_factor if mesh_dim in in_pieces else 1
            here = mesh.size(mesh_dim), coordinate[mesh_dim]
            runs[placement.dim] = _of_pieces(runs[placement.dim], pieces, *here)
        part = Part._of_runs(runs)
        if part.shape == found:
            return None if part.shape == tuple(tensor.shape) else part
        if 0 in part.shape and 0 in found:
            # It has no elements, so it does not matter what it was cut from.
            return Part(found, ())
    raise NotImplementedError(
        f"a DTensor of shape {list(tensor.shape)} that is {tensor.placements} has a local tensor "
        f"of shape {list(found)}: expected {list(part.shape)}, as torch shards it"
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def device_of(tensor: Any) -> torch.device:
    """Return the device for tensors like this one; the ``meta`` device if nothing determines it."""
    local = local_of(tensor)
    if is_sharded(tensor) and local.is_meta:
        return torch.device(tensor.device_mesh.device_type)
    return local.device


def as_sharded(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this process's part as a DTensor with the placement of another."""
    from torch.distributed.tensor import DTensor  # as above

    mesh, stride = like.device_mesh, torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, like.placements, run_check=False, shape=like.shape, stride=stride
    )


def _length(runs: _Runs) -> int:
    return sum(stop - start for start, stop in runs)


def _chunk(runs: _Runs, count: int, index: int) -> _Runs:
    """Return one of ``count`` parts of equal length; the last ones may be shorter, or empty."""
    each = -(-_length(runs) // count)
    first, end = index * each, (index + 1) * each
    found: _Runs = []
    for start, stop in runs:
        size = stop - start
        low, high = max(first, 0), min(end, size)
        if low < high:
            found.append((start + low, start + high))
        first, end = first - size, end - size
    return found or [(runs[-1][1], runs[-1][1])]


def _of_pieces(runs: _Runs, pieces: int, count: int, index: int) -> _Runs:
    """Return the ranges of one of ``count`` parts of each of ``pieces`` pieces of equal length.

    Empty ranges are left out, and neighbours joined.
    """
    found: _Runs = []
    end = 0
    for piece in range(pieces):
        for start, stop in _chunk(_chunk(runs, pieces, piece), count, index):
            end = stop
            if found and found[-1][1] == start and start < stop:
                found[-1] = (found[-1][0], stop)
            elif start < stop:
                found.append((start, stop))
    return found or [(end, end)]
