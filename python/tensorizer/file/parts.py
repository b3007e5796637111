"""The parts of tensors that a request wants, checked and planned by one native call."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
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
        first: The number in the view of the first box of each tensor; None without cuts.
        box_counts: The number of boxes of each tensor that has not one.
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
    """Plan the parts of tensors: first of those that are sliced, in the order of the slices.

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
    indices, names, missing = _indices_of(file, request, keys)
    parts = {} if missing else _parts_of(file, request, keys, given, indices)
    shard = request.shard
    dims = {} if missing or shard is None else _dims_of(shard, keys, indices)
    cuts = {**indices, **parts, **dims}
    order = list(dict.fromkeys([*indices, *keys.values()])) if cuts else []

    def boxes_at(at: int) -> tuple[list[sharding.Ranges], tuple[Any, ...]]:
        """Return the boxes of a tensor, and the index to apply to what is loaded of them."""
        number = order[at]
        shape = torch.Size(file.reader.describe(number)[1])
        part = parts.get(number)
        if part is None and number in dims and shard is not None:
            part = shard.part(file.reader.name(number), shape)
        if part is not None:
            return [box.ranges for box in part.boxes], ()
        try:
            ranges, rest = ranges_of(shape, index_of(shape, indices[number]), clips=False)
        except (IndexError, TypeError, ValueError) as error:
            raise type(error)(f"the slice of {names[number]!r}: {error}") from None
        return [tuple(ranges)], rest

    planned = PlannedParts(file, {}, None, {}, {})
    if cuts:
        known = [indices.get(n, parts.get(n)) for n in order]
        of_shard = [dims.get(n) for n in order] if dims else []
        place = (shard.rank, shard.world) if shard else (0, 1)
        reader, rests, several = plan_parts(file.reader, order, known, (of_shard, *place), boxes_at)
        counts = {order[at]: count for at, count in several}
        lens = [counts.get(number, 1) for number in order]
        first = dict(zip(order, itertools.accumulate(lens, initial=0), strict=False))
        numbers = [n for n, boxes in zip(order, lens, strict=True) for _ in range(boxes)]
        view = file.with_parts(reader, numbers)
        planned = PlannedParts(view, cuts, first, counts, {order[at]: rest for at, rest in rests})
    if missing:
        raise KeyError(f"a slice of {missing[0]!r}, which is not among the tensors to load")
    return planned


def _indices_of(
    file: OpenFile, request: Request, keys: Mapping[Any, int]
) -> tuple[dict[int, Any], dict[int, Name], list[Name]]:
    """Return the indices and names of the tensors that are sliced, by number.

    The list has the first name that is not among the tensors, if there is one.

    Raises:
        ValueError: There are different indices of one tensor, which its names may have.

    """
    indices: dict[int, Any] = {}
    names: dict[int, Name] = {}
    among = set(keys.values()) if request.slices else set()
    for name, index in request.slices.items():
        number = keys.get(name)
        if number is None:
            with contextlib.suppress(KeyError):
                number = file.find(name)
        if number is None or number not in among:
            return indices, names, [name]
        first = request.slices[names.setdefault(number, name)]
        if first is not index and repr(first) != repr(index):
            raise ValueError(
                f"two slices of tensor {file.reader.name(number)!r} are requested by two names: "
                f"{first!r} and {index!r}"
            )
        # To the native call None means a whole tensor; as a slice it is an error, as `(None,)` is.
        indices[number] = (None,) if index is None else index
    return indices, names, []


def _dims_of(shard: Shard, keys: Mapping[Any, int], indices: Mapping[int, Any]) -> dict[int, Any]:
    """Return the dimension in which each tensor is cut among ranks.

    Raises:
        ValueError: A tensor has a slice too, or is requested twice.

    """
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
        tensor = given.get(number)
        part = sharding.part_of(tensor) if sharding.is_sharded(tensor) else None
        sliced = number in indices or number in parts
        if part is not None and sliced:
            raise ValueError(f"both a slice and a shard of {name!r} are asked for")
        checked = part is not None or (request.like is not None and not sliced)
        if checked and tensor is not None and list(tensor.shape) != list(shape):
            raise ValueError(
                f"tensor {name!r}: the file holds {list(shape)}, and the tensor in out= or like= "
                f"has {list(tensor.shape)}"
            )
        if part is not None:
            parts[number] = part
    return parts
