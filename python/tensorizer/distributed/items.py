"""The items of a checkpoint as JSON, decoded one by one on access."""

from __future__ import annotations

import functools
import itertools
import math
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from .._errors import FormatError
from ..tensors.handles import dtype_of
from . import chunks

#: The most chunks of all tensors together. It bounds the work for a small file that describes many.
MOST_CHUNKS = 1 << 26
#: The errors that content of an unexpected form raises.
_DECODE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError)


@contextmanager
def decoding(uri: str) -> Iterator[None]:
    """Raise ``FormatError`` for content of an unexpected form."""
    try:
        yield
    except _DECODE_ERRORS as error:
        raise FormatError(f"{uri} is not a checkpoint, or is damaged: {error!r}") from error


@dataclass(frozen=True)
class ItemLocation:
    """The file of an item's bytes, in the checkpoint's folder, and the name of its tensor there.

    Attributes:
        dtype, shape: Those of the tensor, as stated by a checkpoint that was read.

    """

    file: str
    name: str
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] | None = None


def stored_name(name: str, offsets: Sequence[int]) -> str:
    """Return a chunk's name in its rank's file: the tensor's name, with offsets unless all 0."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


def encoded(
    items: Mapping[str, Any], locations: Mapping[dcp.MetadataIndex, ItemLocation]
) -> dict[str, Any]:
    """Return items as JSON, with the files and the orders of files that they refer to.

    Args:
        items: Metadata of all items.
        locations: The locations of all chunks and objects.

    Raises:
        ValueError: The chunks of a tensor do not cover each element exactly once.

    """
    files = sorted({location.file for location in locations.values()})
    numbers = {file: number for number, file in enumerate(files)}
    found: dict[str, dict[Any, tuple[int, str]]] = {}
    for index, location in locations.items():
        found.setdefault(index.fqn, {})[index.offset] = (numbers[location.file], location.name)
    orders: dict[tuple[int, ...], int] = {}
    result: dict[str, Any] = {}
    for name, item in items.items():
        if isinstance(item, dcp.TensorStorageMetadata):
            result[name] = _encoded_tensor(name, item, found[name], orders)
        else:
            result[name] = {"object": list(found[name][None])}
    return {"files": files, "items": result} | ({"orders": [*map(list, orders)]} if orders else {})


def check_count(count: int) -> None:
    """Raise ``ValueError`` for more chunks than a checkpoint may have."""
    if count > MOST_CHUNKS:
        raise ValueError(f"expected at most {MOST_CHUNKS} chunks of tensors, found {count}")


def _encoded_tensor(
    name: str,
    item: dcp.TensorStorageMetadata,
    locations: dict[Any, tuple[int, str]],
    orders: dict[tuple[int, ...], int],
) -> dict[str, Any]:
    """Return the JSON of a tensor: a grid if its chunks form one, otherwise a list of chunks."""
    dtype = str(item.properties.dtype).removeprefix("torch.")
    made: dict[str, Any] = {"dtype": dtype, "size": list(item.size)}
    listed = item.chunks
    boxes: dict[Any, Any] = {one.offsets: one.sizes for one in listed}
    # Ranks without elements of a tensor have an empty chunk each, which is not in the grid.
    full = {offsets: sizes for offsets, sizes in boxes.items() if 0 not in sizes}
    grid = chunks.grid_of(item.size, full) if 1 < len(boxes) == len(listed) else None
    if grid is None:
        chunks.check_coverage(name, item)
    elif all(locations[one][1] == stored_name(name, one) for one in full):
        order = tuple(locations[one][0] for one in sorted(full))
        cuts = chunks.encoded_grid(item.size, grid)
        made |= {"grid": cuts, "order": orders.setdefault(order, len(orders))}
        listed = [one for one in listed if 0 in one.sizes]
        if not listed:
            return made
    made["chunks"] = [
        [list(one.offsets), list(one.sizes), *locations[one.offsets]] for one in listed
    ]
    return made


class Items(UserDict[str, Any]):
    """The metadata of all items of a checkpoint, each decoded on first access and kept.

    Args:
        uri: The file, for errors.
        content: The parsed JSON of the file.
        files: The names of the files of ranks.

    Raises:
        KeyError, TypeError, ValueError: It is damaged as a whole.

    """

    def __init__(self, uri: str, content: dict[str, Any], files: list[str]) -> None:
        super().__init__()
        self._uri, self._files = uri, files
        self._raw: dict[str, Any] = dict(content["items"].items())
        self._orders = content["orders"] if content["version"] > 1 else []
        # Many tensors of a model have the same shape and cuts: they share one list.
        self._chunks_of_grid = functools.cache(chunks.of_grid)
        # None for items that were not accessed yet.
        self.data = dict.fromkeys(self._raw)
        tensors = [item for item in self._raw.values() if "object" not in item]
        check_count(sum(len(self._order(one)) + len(one.get("chunks", ())) for one in tensors))

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            self.data[name] = self.decoded(name)
        return self.data[name]

    def __or__(self, other: Any) -> Any:
        return {**self, **other}

    def __ror__(self, other: Any) -> Any:
        return {**other, **self}

    def _order(self, item: dict[str, Any]) -> Sequence[int]:
        """Return the numbers of the files that hold a grid's chunks, in the grid's order."""
        if "grid" not in item:
            return []
        number = item["order"]
        if type(number) is not int or number < 0:
            raise ValueError(f"expected one of {len(self._orders)} orders, found {number!r}")
        order = self._orders[number]
        if not isinstance(order, list):
            raise TypeError("expected a list of files for each order")
        return order

    def decoded(self, name: str) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
        """Return the metadata of an item.

        Raises:
            FormatError: It is damaged.

        """
        item = self._raw[name]
        with decoding(self._uri):
            if "object" in item:
                self._location(*item["object"])
                return dcp.BytesStorageMetadata()
            properties = dcp.TensorProperties(dtype=dtype_of(item["dtype"]))
            made = dcp.TensorStorageMetadata(properties, _size(item["size"]), [])
            for offsets, sizes, number, stored in item.get("chunks", []):
                self._location(number, stored)
                made.chunks.append(dcp.ChunkStorageMetadata(_size(offsets), _size(sizes)))
            if "grid" not in item:
                chunks.check_coverage(name, made)
            elif outside := [box for box in made.chunks if 0 not in box.sizes]:
                raise ValueError(f"chunks of {name!r} overlap its grid: {outside[0]}")
            else:
                starts, files = chunks.decoded_grid(made.size, item["grid"]), len(self._order(item))
                if (count := math.prod(map(len, starts))) != files:
                    raise ValueError(f"{files} files for a grid of {count} chunks")
                made.chunks = self._chunks_of_grid(made.size, starts) + made.chunks
        return made

    def location(self, index: dcp.MetadataIndex) -> ItemLocation:
        """Return the location of the bytes of an object or a chunk.

        Raises:
            KeyError: There is no such chunk.
            FormatError: It is damaged.

        """
        raw, item = self._raw[index.fqn], self[index.fqn]
        if "object" in raw:
            return self._location(*raw["object"])
        number, order = _number_of(index, item.chunks), self._order(raw)
        about = item.properties.dtype, tuple(item.chunks[number].sizes)
        with decoding(self._uri):
            if number < len(order):
                stored = stored_name(index.fqn, index.offset or ())
                return self._location(order[number], stored, *about)
            return self._location(*raw["chunks"][number - len(order)][2:], *about)

    def _location(self, number: int, name: str, *about: Any) -> ItemLocation:
        if type(number) is not int or not 0 <= number < len(self._files) or type(name) is not str:
            raise ValueError(
                f"expected one of {len(self._files)} files and a name, found {number!r}, {name!r}"
            )
        name.encode()  # raises for lone surrogates
        return ItemLocation(self._files[number], name, *about)


class ItemLocations:
    """The locations of all chunks and objects, each looked up on access."""

    def __init__(self, items: Items) -> None:
        self._items = items

    def __getitem__(self, index: dcp.MetadataIndex) -> ItemLocation:
        return self._items.location(index)


def _number_of(index: dcp.MetadataIndex, chunks: Sequence[dcp.ChunkStorageMetadata]) -> int:
    """Return the number of a chunk: mostly the one that torch's planner gives as a hint."""
    hint = [] if index.index is None else [index.index]
    for number in itertools.chain(hint, range(len(chunks))):
        if number < len(chunks) and chunks[number].offsets == (index.offset or ()):
            return number
    raise KeyError(index)


def _size(numbers: Sequence[int]) -> torch.Size:
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError(f"expected lengths, found {numbers!r}")
    return torch.Size(numbers)
