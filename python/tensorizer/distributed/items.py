"""The items of a checkpoint as JSON, decoded one by one on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from .._errors import FormatError
from ..tensors.handles import dtype_of
from . import chunk_coverage, grids

#: The most chunks of all tensors together. It bounds the work for a small file that describes many.
MOST_CHUNKS = 1 << 26
#: The errors that content of an unexpected form raises.
DECODE_ERRORS = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    OverflowError,
    NotImplementedError,
)


def damaged_error(uri: str, error: Exception) -> FormatError:
    """Return the error for a damaged checkpoint."""
    return FormatError(f"{uri} is not a checkpoint, or is damaged: {error!r}")


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
    items: Mapping[str, Any],
    locations: Mapping[dcp.MetadataIndex, ItemLocation],
    whole: bool = True,
) -> dict[str, Any]:
    """Return items as JSON, with the files and the orders of files that they refer to.

    Args:
        items: Metadata of all items.
        locations: The locations of all chunks and objects.
        whole: Refuse tensors whose chunks do not cover each element exactly once.

    Raises:
        ValueError: The chunks of a tensor do not cover it so; or there are too many chunks.

    """
    files = sorted({location.file for location in locations.values()})
    numbers = {file: number for number, file in enumerate(files)}
    found: dict[str, dict[Any, tuple[int, str]]] = {}
    for index, location in locations.items():
        found.setdefault(index.fqn, {})[index.offset] = (numbers[location.file], location.name)
    orders: dict[tuple[int, ...], int] = {}
    result: dict[str, Any] = {}
    count = 0
    for name, item in items.items():
        if isinstance(item, dcp.TensorStorageMetadata):
            count += len(item.chunks)
            result[name] = _encoded_tensor(name, item, found[name], orders, whole)
        else:
            result[name] = {"object": list(found[name][None])}
    check_count(count)
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
    whole: bool,
) -> dict[str, Any]:
    """Return the JSON of a tensor: a grid if its chunks form one, otherwise a list of chunks."""
    dtype = str(item.properties.dtype).removeprefix("torch.")
    made: dict[str, Any] = {"dtype": dtype, "size": list(item.size)}
    listed = item.chunks
    grid = _grid_of(item) if len(listed) > 1 else None
    if grid:
        # Ranks without elements of a tensor have an empty chunk each, which is not in the grid.
        full = sorted(one.offsets for one in listed if 0 not in one.sizes)
        if all(locations[one][1] == stored_name(name, one) for one in full):
            order = tuple(locations[one][0] for one in full)
            made |= {"grid": grid.encoded(), "order": orders.setdefault(order, len(orders))}
            listed = [one for one in listed if 0 in one.sizes]
            if not listed:
                return made
    elif whole:
        chunk_coverage.check(name, item)
    made["chunks"] = [
        [list(one.offsets), list(one.sizes), *locations[one.offsets]] for one in listed
    ]
    return made


def _grid_of(item: dcp.TensorStorageMetadata) -> grids.Grid | None:
    """Return the grid that the non-empty chunks form, if no two chunks have the same offsets."""
    boxes = {one.offsets: one.sizes for one in item.chunks}
    if len(boxes) != len(item.chunks):
        return None
    return grids.of_chunks(item.size, {at: sizes for at, sizes in boxes.items() if 0 not in sizes})


class ItemDecoder:
    """The JSON of items, which are decoded one at a time.

    Args:
        uri: The file, for errors.
        content: The parsed JSON of the file.
        files: The names of the files of ranks.

    Raises:
        KeyError, TypeError, ValueError: It is damaged as a whole.

    """

    def __init__(self, uri: str, content: dict[str, Any], files: list[str]) -> None:
        self.uri, self.files = uri, files
        self.raw: dict[str, Any] = dict(content["items"].items())
        self._orders = content["orders"] if content["version"] > 1 else []
        self._checked_orders: set[int] = set()
        self._chunks_by_cut: dict[tuple[torch.Size, str], list[dcp.ChunkStorageMetadata]] = {}
        #: Chunks by offsets, of tensors with a chunk that was not at the index hinted by a planner.
        self._entries_by_offsets: dict[str, dict[tuple[int, ...], Any]] = {}
        check_count(sum(map(self._count, self.raw.values())))

    def _count(self, item: Any) -> int:
        if "object" in item:
            return 0
        inside = len(self._order(item)) if "grid" in item else 0
        return inside + len(item.get("chunks", ()))

    def _order(self, item: dict[str, Any]) -> Sequence[int]:
        """Return the numbers of the files that hold a grid's chunks, in the grid's order."""
        number = item["order"]
        if type(number) is not int or number < 0:
            raise ValueError(f"expected one of {len(self._orders)} orders, found {number!r}")
        order: Sequence[int] = self._orders[number]
        if number not in self._checked_orders:
            if not isinstance(order, list):
                raise TypeError("expected a list of files for each order")
            for one in order:
                self._check_file(one)
            self._checked_orders.add(number)
        return order

    def _check_file(self, number: Any) -> None:
        if type(number) is not int or not 0 <= number < len(self.files):
            raise ValueError(f"expected one of {len(self.files)} files, found {number!r}")

    def item(self, name: str) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
        """Return the metadata of an item."""
        item = self.raw[name]
        try:
            if "object" in item:
                self._location(*item["object"])
                return dcp.BytesStorageMetadata()
            properties = dcp.TensorProperties(dtype=dtype_of(item["dtype"]))
            size = _size(item["size"])
            return dcp.TensorStorageMetadata(properties, size, self._chunks(name, item, size))
        except DECODE_ERRORS as error:
            raise damaged_error(self.uri, error) from error

    def _grid(self, item: dict[str, Any]) -> grids.Grid:
        grid, order = grids.decoded(_size(item["size"]), item["grid"]), self._order(item)
        if grid.count != len(order):
            raise ValueError(f"{len(order)} files for a grid of {grid.count} chunks")
        return grid

    def _chunks(
        self, name: str, item: dict[str, Any], size: torch.Size
    ) -> list[dcp.ChunkStorageMetadata]:
        """Return the chunks of a tensor, which cover each element exactly once."""
        if "grid" not in item:
            listed = self._listed_chunks(item["chunks"])
            _check_coverage(name, size, listed)
            return listed
        grid, listed = self._grid(item), self._listed_chunks(item.get("chunks", []))
        outside = [box for box in listed if 0 not in box.sizes]
        if outside:
            raise ValueError(f"chunks of {name!r} overlap its grid: {outside[0]}")
        # Many tensors of a model have the same shape and cuts: they share one list.
        cut = (size, str(item["grid"]))
        if cut not in self._chunks_by_cut:
            self._chunks_by_cut[cut] = grid.chunks()
        return self._chunks_by_cut[cut] + listed

    def _listed_chunks(self, listed: Sequence[Any]) -> list[dcp.ChunkStorageMetadata]:
        """Return the chunks of a list, with their locations checked."""
        found = []
        for offsets, sizes, number, stored in listed:
            self._location(number, stored)
            found.append(dcp.ChunkStorageMetadata(_size(offsets), _size(sizes)))
        return found

    def location(self, index: dcp.MetadataIndex) -> ItemLocation:
        """Return the location of the bytes of an object or a chunk.

        Raises:
            KeyError: There is no such chunk.
            FormatError: It is damaged.

        """
        item = self.raw[index.fqn]
        try:
            if "object" in item:
                return self._location(*item["object"])
            dtype, offsets = dtype_of(item["dtype"]), tuple(index.offset or ())
            inside = self._grid(item).find(offsets) if "grid" in item else None
            if inside is not None:
                number, shape = inside
                stored = stored_name(index.fqn, offsets)
                return self._location(self._order(item)[number], stored, dtype, shape)
            entry = self._entry(index, item, offsets)
            if entry is not None:
                _, sizes, number, stored = entry
                return self._location(number, stored, dtype, tuple(_size(sizes)))
        except DECODE_ERRORS as error:
            raise damaged_error(self.uri, error) from error
        raise KeyError(index)

    def _entry(self, index: dcp.MetadataIndex, item: dict[str, Any], offsets: Sequence[int]) -> Any:
        """Return the description of one chunk, or None."""
        listed, hint = item.get("chunks", []), index.index
        if hint is not None and 0 <= hint < len(listed) and listed[hint][0] == list(offsets):
            return listed[hint]
        if index.fqn not in self._entries_by_offsets:
            self._entries_by_offsets[index.fqn] = {tuple(one[0]): one for one in listed}
        return self._entries_by_offsets[index.fqn].get(tuple(offsets))

    def _location(
        self,
        number: int,
        name: str,
        dtype: torch.dtype = torch.uint8,
        shape: tuple[int, ...] | None = None,
    ) -> ItemLocation:
        if (
            type(number) is not int
            or not 0 <= number < len(self.files)
            or not isinstance(name, str)
        ):
            raise ValueError(
                f"expected one of {len(self.files)} files and a name, found {number!r}, {name!r}"
            )
        name.encode()  # raises for lone surrogates
        return ItemLocation(self.files[number], name, dtype, shape)


class LazyItems(MutableMapping[str, Any]):
    """The metadata of all items, each decoded on first access and kept."""

    def __init__(self, content: ItemDecoder) -> None:
        self._content = content
        #: None for items that were not accessed yet.
        self._items: dict[str, Any] = dict.fromkeys(content.raw)

    def __getitem__(self, name: str) -> Any:
        found = self._items[name]
        if found is None:
            found = self._items[name] = self._content.item(name)
        return found

    def __setitem__(self, name: str, item: Any) -> None:
        self._items[name] = item

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}


class ItemLocations:
    """The locations of all chunks and objects, each looked up on access."""

    def __init__(self, content: ItemDecoder) -> None:
        self._content = content

    def __getitem__(self, index: dcp.MetadataIndex) -> ItemLocation:
        return self._content.location(index)


def _check_coverage(name: str, size: torch.Size, chunks: list[dcp.ChunkStorageMetadata]) -> None:
    boxes: dict[tuple[int, ...], tuple[int, ...]] = {one.offsets: one.sizes for one in chunks}
    # A grid covers each element of a tensor exactly once.
    if len(boxes) != len(chunks) or grids.of_chunks(size, boxes) is None:
        chunk_coverage.check(name, dcp.TensorStorageMetadata(dcp.TensorProperties(), size, chunks))


def _size(numbers: Sequence[int]) -> torch.Size:
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError(f"expected lengths, found {numbers!r}")
    return torch.Size(numbers)
