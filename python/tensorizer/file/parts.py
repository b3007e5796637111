"""The parts of tensors that a request wants, checked and planned by one native call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._native import plan_parts
from .._types import Name
from ..tensors import sharding
from ..tensors.sharding import Part, Shard
from .open_file import OpenFile
from .request import Request
from .slices import index_of, ranges_of


class PlannedParts(NamedTuple):
    """The parts of a request's tensors.

    Attributes:
        file: A view of the file whose tensors are the boxes of the parts; the file itself if all
            tensors are wanted as wholes.
        cuts: By number, for each tensor of which only a part is wanted: an index, a dimension, or
            a :class:`Part`.
        first: The first box of each tensor in the view; None without cuts.
        box_counts: The number of boxes of tensors that have not one.
        rests: The indices to apply to what is loaded.

    """

    file: OpenFile
    cuts: Mapping[int, Any]
    first: Mapping[int, int] | None
    box_counts: Mapping[int, int]
    rests: Mapping[int, tuple[Any, ...]]


def planned_parts(
    file: OpenFile, request: Request, keys: Mapping[Any, int], given: Mapping[int, Any]
) -> PlannedParts:
    """Plan the parts of tensors.

    Args:
        file: Their file.
        request: The request.
        keys: The numbers of the tensors, by key.
        given: The tensors of ``out`` or ``like``, by number.

    Raises:
        KeyError: A slice is for none of the tensors.
        IndexError, TypeError, ValueError: An index or a shard does not fit its tensor, or two of
            them are for the same one.

    """
    names = list(request.slices)
    found = _found(file, keys, names) if names else []
    # To the native call None means a whole tensor; as a slice it is an error, as `(None,)` is.
    given_indices = [(None,) if index is None else index for index in request.slices.values()]
    indices: dict[int, Any] = dict(zip(found, given_indices, strict=False))
    if len(indices) < len(found):
        _refuse_different(file, found, list(request.slices.values()))
    parts = {} if len(found) < len(names) else _parts_of(file, request, keys, given, indices)
    dims = {} if len(found) < len(names) else _dims_of(request.shard, keys, indices)
    named = dict(zip(reversed(found), reversed(names[: len(found)]), strict=True))
    planned = _Planner(file, named, indices, parts, dims, request.shard).plan(keys.values())
    if len(found) < len(names):
        missing = names[len(found)]
        raise KeyError(f"a slice of {missing!r}, which is not among the tensors to load")
    return planned


@dataclasses.dataclass(frozen=True)
class _Planner:
    """The cuts of the tensors of a file, by number."""

    file: OpenFile
    #: The names of the tensors that are sliced.
    names: Mapping[int, Name]
    indices: Mapping[int, Any]
    parts: Mapping[int, Part]
    dims: Mapping[int, Any]
    shard: Shard | None

    def plan(self, numbers: Iterable[int]) -> PlannedParts:
        """Plan the parts of tensors: first of those that are sliced, in the order of the slices."""
        cuts = {**self.indices, **self.parts, **self.dims}
        if not cuts:
            return PlannedParts(self.file, {}, None, {}, {})
        order = list(dict.fromkeys([*self.indices, *numbers]))
        indices = [self.indices.get(n, self.parts.get(n)) for n in order]
        dims = [self.dims.get(n) for n in order] if self.dims else []
        rank, world = (self.shard.rank, self.shard.world) if self.shard else (0, 1)

        def boxes_at(at: int) -> tuple[Sequence[Sequence[tuple[int, int]]], tuple[Any, ...]]:
            return self._boxes(order[at])

        reader, rests, several = plan_parts(
            self.file.reader, order, indices, (dims, rank, world), boxes_at
        )
        counts = {order[at]: count for at, count in several}
        entries = [n for n in order for _ in range(counts.get(n, 1))] if counts else order
        first: dict[int, int] = dict(zip(reversed(entries), range(len(entries))[::-1], strict=True))
        first.update((n, 0) for n, count in counts.items() if count == 0)
        view = self.file.with_parts(reader, entries)
        return PlannedParts(view, cuts, first, counts, {order[at]: rest for at, rest in rests})

    def _boxes(self, number: int) -> tuple[Sequence[Sequence[tuple[int, int]]], tuple[Any, ...]]:
        """Return the boxes of a tensor, and the index to apply to what is loaded of them."""
        part = self.parts.get(number)
        if part is not None:
            return [box.ranges for box in part.boxes], ()
        shape = torch.Size(self.file.reader.describe(number)[1])
        if number in self.dims and self.shard is not None:
            shard = dataclasses.replace(self.shard, dim=self.dims[number])
            part = shard.part(self.file.reader.name(number), shape)
            return [box.ranges for box in part.boxes] if part else [], ()
        try:
            index = index_of(shape, self.indices[number])
            ranges, rest = ranges_of(shape, index, clips=False)
        except (IndexError, TypeError, ValueError) as error:
            raise type(error)(f"the slice of {self.names[number]!r}: {error}") from None
        return [ranges], rest


def _found(file: OpenFile, keys: Mapping[Any, int], names: Iterable[Name]) -> list[int]:
    """Return the numbers of the names, up to the first that is not among the tensors."""
    known = [keys.get(name) for name in names]
    among = set(keys.values()) if None in known else set()
    found: list[int] = []
    for name, number in zip(names, known, strict=True):
        at = number
        if at is None:
            with contextlib.suppress(KeyError):
                at = file.find(name)
        if at is None or (number is None and at not in among):
            break
        found.append(at)
    return found


def _refuse_different(file: OpenFile, numbers: Sequence[int], indices: Sequence[Any]) -> None:
    """Refuse different indices of one tensor, which its names may have.

    Raises:
        ValueError: There are some.

    """
    found: dict[int, str] = {}
    for number, index in zip(numbers, indices, strict=False):
        if found.setdefault(number, repr(index)) != repr(index):
            raise ValueError(
                f"two slices of tensor {file.reader.name(number)!r} are requested by two names: "
                f"{found[number]} and {index!r}"
            )


def _dims_of(
    shard: Shard | None, keys: Mapping[Any, int], indices: Mapping[int, Any]
) -> dict[int, Any]:
    """Return the dimension in which each tensor is cut among ranks.

    Raises:
        ValueError: A tensor has a slice too, or is requested twice.

    """
    if shard is None:
        return {}
    dim_of = shard.dim if callable(shard.dim) else lambda _: shard.dim
    dims: dict[int, Any] = {}
    for name, number in keys.items():
        dim = dim_of(name)
        if dim is None:
            continue
        if number in indices:
            raise ValueError(f"both a slice and a shard of {name!r} are asked for")
        if number in dims:
            raise ValueError(f"{name!r} is requested twice, by two names")
        dims[number] = dim
    return dims


def _parts_of(
    file: OpenFile,
    request: Request,
    keys: Mapping[Any, int],
    given: Mapping[int, Any],
    indices: Mapping[int, Any],
) -> dict[int, Part]:
    """Return the parts of this process, for tensors that are DTensors in ``out`` or ``like``.

    Raises:
        ValueError: A tensor has another shape in the file, or a slice too.

    """
    if request.like is None and not sharding.are_any_sharded(given.values()):
        return {}
    parts = dict[int, Part]()
    shapes = file.reader.describe_all(list(keys.values()))
    for (name, number), (_, shape) in zip(keys.items(), shapes, strict=True):
        tensor, part = given.get(number), None
        if sharding.is_sharded(tensor):
            part = sharding.part_of(tensor)
        sliced = number in indices or number in parts
        if request.like is not None and tensor is not None and not sliced:
            _check_shape(name, tensor, list(shape))
        if part is not None and sliced:
            raise ValueError(f"both a slice and a shard of {name!r} are asked for")
        if part is not None:
            _check_shape(name, tensor, list(shape))
            parts[number] = part
    return parts


def _check_shape(name: Name, given: Any, shape: list[int]) -> None:
    if list(given.shape) != shape:
        raise ValueError(
            f"tensor {name!r}: the file holds {shape}, and the tensor in out= or like= has "
            f"{list(given.shape)}"
        )
