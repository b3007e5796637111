"""The items of a checkpoint as JSON, which are decoded one by one when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from .._errors import FormatError
from ..tensors.exchange import dtype_of
from . import cover, grids

#: Chunks of all tensors together. Bounds the work of a checkpoint that describes many in few bytes.
MOST_CHUNKS = 1 << 26
#: Errors of content that is not as expected.
DAMAGED = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    OverflowError,
    NotImplementedError,
)


def damaged(uri: str, error: Exception) -> FormatError:
    """Return the error of a checkpoint that is damaged."""
    return FormatError(f"{uri} is no checkpoint, or damaged: {error!r}")


@dataclass(frozen=True)
class Place:
    """The place of an item's bytes: the file, beside this one, and the name of its tensor.

    Attributes:
        dtype, shape: What a checkpoint that was read says of the tensor.

    """

    file: str
    name: str
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] | None = None


def stored_name(name: str, offsets: Sequence[int]) -> str:
    """Return the name, in the file of a rank, of a chunk whose name is not taken there."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


def encoded(
    items: Mapping[str, Any], places: Mapping[dcp.MetadataIndex, Place], whole: bool = True
) -> dict[str, Any]:
    """Return items as JSON has them, with the files and orders of files that they refer to.

    Args:
        items: Metadata of all items.
        places: The places of all chunks and objects.
        whole: Refuse tensors of which the chunks are not, each once, all.

    Raises:
        ValueError: The chunks of a tensor are not; or there are too many of them.

    """
    files = sorted({place.file for place in places.values()})
    numbers = {file: number for number, file in enumerate(files)}
    found: dict[str, dict[Any, tuple[int, str]]] = {}
    for index, place in places.items():
        found.setdefault(index.fqn, {})[index.offset] = (numbers[place.file], place.name)
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
    """Refuse more chunks than a checkpoint may have."""
    if count > MOST_CHUNKS:
        raise ValueError(f"expected at most {MOST_CHUNKS} chunks of tensors, found {count}")


def _encoded_tensor(
    name: str,
    item: dcp.TensorStorageMetadata,
    places: dict[Any, tuple[int, str]],
    orders: dict[tuple[int, ...], int],
    whole: bool,
) -> dict[str, Any]:
    """Return a tensor: a grid if its chunks make one, and otherwise chunk by chunk."""
    dtype = str(item.properties.dtype).removeprefix("torch.")
    made: dict[str, Any] = {"dtype": dtype, "size": list(item.size)}
    listed = item.chunks
    grid = _grid_of(item) if len(listed) > 1 else None
    if grid:
        # Ranks without elements of a tensor have a chunk too, which is beside the grid.
        full = sorted(one.offsets for one in listed if 0 not in one.sizes)
        if all(places[one][1] == stored_name(name, one) for one in full):
            order = tuple(places[one][0] for one in full)
            made |= {"grid": grid.encoded(), "order": orders.setdefault(order, len(orders))}
            listed = [one for one in listed if 0 in one.sizes]
            if not listed:
                return made
    elif whole:
        cover.check(name, item)
    made["chunks"] = [[list(one.offsets), list(one.sizes), *places[one.offsets]] for one in listed]
    return made


def _grid_of(item: dcp.TensorStorageMetadata) -> grids.Grid | None:
    """Return the grid that chunks with elements make, if all chunks begin at different places."""
    boxes = {one.offsets: one.sizes for one in item.chunks}
    if len(boxes) != len(item.chunks):
        return None
    return grids.of_chunks(item.size, {at: sizes for at, sizes in boxes.items() if 0 not in sizes})


class Content:
    """The JSON of items, from which one after another is decoded.

    Args:
        uri: The file, for errors.
        content: What it holds.
        files: The names of the files of ranks.

    Raises:
        KeyError, TypeError, ValueError: It is damaged as a whole.

    """

    def __init__(self, uri: str, content: dict[str, Any], files: list[str]) -> None:
        self.uri, self.files = uri, files
        self.raw: dict[str, Any] = dict(content["items"].items())
        self._orders = content["orders"] if content["version"] > 1 else []
        self._checked: set[int] = set()
        self._made: dict[tuple[torch.Size, str], list[dcp.ChunkStorageMetadata]] = {}
        #: The entries of tensors that were not found at the place that a planner has hinted at.
        self._entries: dict[str, dict[tuple[int, ...], Any]] = {}
        check_count(sum(map(self._count, self.raw.values())))

    def _count(self, item: Any) -> int:
        if "object" in item:
            return 0
        inside = len(self._order(item)) if "grid" in item else 0
        return inside + len(item.get("chunks", ()))

    def _order(self, item: dict[str, Any]) -> Sequence[int]:
        """Return the numbers of the files of a grid's chunks."""
        number = item["order"]
        if type(number) is not int or number < 0:
            raise ValueError(f"expected one of {len(self._orders)} orders, found {number!r}")
        order: Sequence[int] = self._orders[number]
        if number not in self._checked:
            if not isinstance(order, list):
                raise TypeError("expected a list of files for each order")
            for one in order:
                self._check_file(one)
            self._checked.add(number)
        return order

    def _check_file(self, number: Any) -> None:
        if type(number) is not int or not 0 <= number < len(self.files):
            raise ValueError(f"expected one of {len(self.files)} files, found {number!r}")

    def item(self, name: str) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
        """Return the metadata of an item."""
        item = self.raw[name]
        try:
            if "object" in item:
                self._place(*item["object"])
                return dcp.BytesStorageMetadata()
            properties = dcp.TensorProperties(dtype=dtype_of(item["dtype"]))
            size = _size(item["size"])
            return dcp.TensorStorageMetadata(properties, size, self._chunks(name, item, size))
        except DAMAGED as error:
            raise damaged(self.uri, error) from error

    def _grid(self, item: dict[str, Any]) -> grids.Grid:
        grid, order = grids.decoded(_size(item["size"]), item["grid"]), self._order(item)
        if grid.count != len(order):
            raise ValueError(f"{len(order)} files for a grid of {grid.count} chunks")
        return grid

    def _chunks(
        self, name: str, item: dict[str, Any], size: torch.Size
    ) -> list[dcp.ChunkStorageMetadata]:
        """Return the chunks of a tensor, which are, each once, all of it."""
        if "grid" not in item:
            listed = self._listed(item["chunks"])
            _check_cover(name, size, listed)
            return listed
        grid, listed = self._grid(item), self._listed(item.get("chunks", []))
        outside = [box for box in listed if 0 not in box.sizes]
        if outside:
            raise ValueError(f"chunks of {name!r} overlap its grid: {outside[0]}")
        # The tensors of a model have few shapes, and are cut alike.
        cut = (size, str(item["grid"]))
        if cut not in self._made:
            self._made[cut] = grid.chunks()
        return self._made[cut] + listed

    def _listed(self, listed: Sequence[Any]) -> list[dcp.ChunkStorageMetadata]:
        """Return the chunks that are described one by one."""
        found = []
        for offsets, sizes, number, stored in listed:
            self._place(number, stored)
            found.append(dcp.ChunkStorageMetadata(_size(offsets), _size(sizes)))
        return found

    def place(self, index: dcp.MetadataIndex) -> Place:
        """Return where the bytes of an object or a chunk are.

        Raises:
            KeyError: There is no such chunk.
            FormatError: It is damaged.

        """
        item = self.raw[index.fqn]
        try:
            if "object" in item:
                return self._place(*item["object"])
            dtype, offsets = dtype_of(item["dtype"]), tuple(index.offset or ())
            inside = self._grid(item).find(offsets) if "grid" in item else None
            if inside is not None:
                number, shape = inside
                stored = stored_name(index.fqn, offsets)
                return self._place(self._order(item)[number], stored, dtype, shape)
            entry = self._entry(index, item, offsets)
            if entry is not None:
                _, sizes, number, stored = entry
                return self._place(number, stored, dtype, tuple(_size(sizes)))
        except DAMAGED as error:
            raise damaged(self.uri, error) from error
        raise KeyError(index)

    def _entry(self, index: dcp.MetadataIndex, item: dict[str, Any], offsets: Sequence[int]) -> Any:
        """Return the description of one chunk, or None."""
        listed, hint = item.get("chunks", []), index.index
        if hint is not None and 0 <= hint < len(listed) and listed[hint][0] == list(offsets):
            return listed[hint]
        if index.fqn not in self._entries:
            self._entries[index.fqn] = {tuple(one[0]): one for one in listed}
        return self._entries[index.fqn].get(tuple(offsets))

    def _place(
        self,
        number: int,
        name: str,
        dtype: torch.dtype = torch.uint8,
        shape: tuple[int, ...] | None = None,
    ) -> Place:
        if (
            type(number) is not int
            or not 0 <= number < len(self.files)
            or not isinstance(name, str)
        ):
            raise ValueError(
                f"expected one of {len(self.files)} files and a name, found {number!r}, {name!r}"
            )
        name.encode()  # raises where it is no text
        return Place(self.files[number], name, dtype, shape)


class Items(MutableMapping[str, Any]):
    """The metadata of all items, each decoded when it is asked for, and kept then."""

    def __init__(self, content: Content) -> None:
        self._content = content
        #: None for items that were not asked for.
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


class Places:
    """The places of all chunks and objects, each found when it is asked for."""

    def __init__(self, content: Content) -> None:
        self._content = content

    def __getitem__(self, index: dcp.MetadataIndex) -> Place:
        return self._content.place(index)


def _check_cover(name: str, size: torch.Size, chunks: list[dcp.ChunkStorageMetadata]) -> None:
    boxes: dict[tuple[int, ...], tuple[int, ...]] = {one.offsets: one.sizes for one in chunks}
    # A grid is all of a tensor, each element once.
    if len(boxes) != len(chunks) or grids.of_chunks(size, boxes) is None:
        cover.check(name, dcp.TensorStorageMetadata(dcp.TensorProperties(), size, chunks))


def _size(numbers: Sequence[int]) -> torch.Size:
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError(f"expected lengths, found {numbers!r}")
    return torch.Size(numbers)
