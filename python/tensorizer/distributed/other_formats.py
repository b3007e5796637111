"""Folders not saved by :class:`Writer`: of torch's own format, and of safetensors files."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import filesystem, metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from .._errors import FormatError
from ..file.open_file import OpenFile
from ..streams.addresses import is_address, is_there
from ..streams.open import open_stream
from ..tensors.handles import dtype_of
from . import layout
from .items import ItemLocation

#: The file in which torch's own writer stores the position of each item.
_METADATA = ".metadata"
#: The entry of a safetensors file's metadata in which torch's writer stores the offsets of parts.
_SHARDING = "DCP_SHARDING_INFO"
#: The modules with the dataclasses of torch's metadata; the last has those of torch before 2.3.
_MODULES = {one.__name__: one for one in (dcp, filesystem, sharded)}


def _member(of: Any, name: str) -> Any:
    """Return a member of an enumeration: early releases of Python 3.11 pickle it by ``getattr``.

    Raises:
        pickle.UnpicklingError: It is an attribute of anything else.

    """
    members = getattr(of, "members", None)
    if not isinstance(members, types.MappingProxyType) or name not in members:
        raise pickle.UnpicklingError(f"it reads the attribute {name!r} of {type(of).__name__}")
    return members[name]


#: Functions that the metadata may name, and classes that it calls like functions.
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    (dcp.__name__, "_MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,
    (sharded.__name__, "MEM_FORMAT_ENCODING"): sharded.MEM_FORMAT_ENCODING,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("builtins", "getattr"): _member,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath")
    },
}


class OfRanksError(FileNotFoundError):
    """A folder of torch's own format has metadata of each rank, and none of all together."""


class FileSystem(filesystem.FileSystem):
    """Files by their paths or addresses, for torch's own reader, which uses these two methods."""

    def create_stream(self, path: str | os.PathLike[Any], mode: str) -> Any:
        """Open a file."""
        return open_stream(os.fspath(path), mode)

    def concat_path(self, path: str | os.PathLike[Any], suffix: str) -> str:
        """Return the path or address of a file in a folder."""
        return layout.join(os.fspath(path), suffix)


def _metadata_path(folder: str, rank: int | None) -> str:
    """Return the path of the metadata of all ranks, or of one."""
    return layout.join(folder, _METADATA if rank is None else f"__{rank}{_METADATA}")


def is_torchs(folder: str, rank: int | None = None) -> bool:
    """Tell whether a folder was saved by torch's own writer; by one rank alone, if it is given."""
    path = _metadata_path(folder, rank)
    return is_there(path, PermissionError) if is_address(path) else Path(path).is_file()


def torch_metadata(folder: str, rank: int | None) -> dcp.Metadata:
    """Return the metadata of a folder of torch's own format, which can run no code.

    With ``use_collectives=False``, each rank has saved metadata of its own.

    Raises:
        pickle.UnpicklingError: It names a class that does not belong to torch's metadata.
        FormatError: It is damaged, or names a file outside of its folder, or bytes beyond the end
            of a file.

    """
    path = _metadata_path(folder, rank)
    with open_stream(path) as stream:
        data = stream.read(layout.MOST_BYTES + 1)
    if len(data) > layout.MOST_BYTES:
        raise FormatError(f"{path} is too long: expected at most {layout.MOST_BYTES} bytes")
    with layout.unpickling(path, "is not a metadata file of torch"):
        found = _MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(found, dcp.Metadata) or not isinstance(found.storage_data, dict):
        raise FormatError(f"{path}: expected torch's Metadata, found {type(found).__name__}")
    _check_locations(path, found.storage_data.values())
    return found


def _check_locations(metadata: str, locations: Iterable[Any]) -> None:
    """Check that every item is within a file beside torch's metadata.

    Raises:
        FormatError: An item is not.

    """

    @functools.cache
    def size_of(name: str) -> int | None:
        # A file at an address is checked when it is read.
        return None if is_address(metadata) else layout.size_of(Path(metadata).parent / name)

    for location in locations:
        name = getattr(location, "relative_path", None)
        if type(name) is not str or "/" in name or "\0" in name or name in ("", ".", ".."):
            raise FormatError(f"{metadata}: expected the name of a file beside it, found {name!r}")
        size = size_of(name)
        start, length = getattr(location, "offset", None), getattr(location, "length", None)
        if type(start) is not int or type(length) is not int or min(start, length) < 0:
            raise FormatError(
                f"{metadata}: expected an offset and a length in {name}, found {start!r} and "
                f"{length!r}"
            )
        if size is not None and start + length > size:
            raise FormatError(
                f"{metadata} has an item of {length} bytes from {start} in {name}, which has "
                f"{size} bytes"
            )


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that accepts the classes of torch's metadata, and no others.

    A pickle may set attributes of everything that it names. So it gets stand-ins that are made for
    this object alone; those of dataclasses make instances of the real ones.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._stand_in = functools.cache(_stand_in)

    def find_class(self, module: str, name: str) -> Any:
        constant = getattr(torch, name, None) if module == "torch" else None
        if isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
            return constant
        return self._stand_in(module, name)


def _stand_in(module: str, name: str) -> Any:
    real: Any = getattr(_MODULES.get(module), name, None)
    if isinstance(real, type) and dataclasses.is_dataclass(real):
        # A pickle makes these without calling the constructor, and then sets their attributes.
        return type(name, (), {"__new__": lambda *_: object.__new__(real)})
    function = _FUNCTIONS.get((module, name))
    if function is None:
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which could run code: where the checkpoint is trusted, "
            "Reader(weights_only=False) reads it"
        )

    def call(*args: Any) -> Any:
        return function(*args)

    # A pickle has no way to make such a mapping.
    vars(call)["members"] = getattr(function, "__members__", None)
    return call


def safetensors_metadata(folder: str, num_readers: int | None) -> dcp.Metadata | None:
    """Return the metadata of a folder of safetensors files; None if there are none.

    At an address it is a model: one file, or an index and its shards. In a local folder it is all
    files, which may have parts of tensors, as torch's ``HuggingFaceStorageWriter`` saves them.
    """
    files = [""] if is_address(folder) else [p.name for p in Path(folder).glob("*.safetensors")]
    found = dcp.Metadata({}, storage_data={})
    for name in sorted(files):
        try:
            opened = OpenFile(layout.join(folder, name), num_readers=num_readers)
        except (FileNotFoundError, PermissionError):
            return None
        with opened as file:
            _add_items(found, name, file)
    return found if files else None


def _add_items(metadata: dcp.Metadata, name: str, file: OpenFile) -> None:
    """Add the tensors of a safetensors file, or its parts of them, to the metadata."""
    parts = json.loads(dict(file.reader.metadata or ()).get(_SHARDING, "{}"))
    for number in range(len(file)):
        tensor = str(file.reader.name(number))
        kind, shape, _ = file.reader.describe(number)
        dtype = dtype_of(kind)
        offsets = parts[tensor]["saved_offsets"] if parts else [0] * len(shape)
        ends = torch.Size(map(sum, zip(offsets, shape, strict=True)))
        about = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), ends, [])
        item: Any = metadata.state_dict_metadata.setdefault(tensor, about)
        item.size = torch.Size(map(max, item.size, ends))
        item.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
        index = dcp.MetadataIndex(tensor, offsets)
        metadata.storage_data[index] = ItemLocation(name, tensor, dtype, tuple(shape))


class CheckingPlanner:
    """A planner wrapper that refuses objects which torch's restricted unpickler refuses.

    Args:
        planner: The planner, which unpickles without restriction.
        folder: The folder, for messages.

    """

    def __init__(self, planner: LoadPlanner, folder: str) -> None:
        self._planner, self._folder = planner, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        """Check an object, and hand it to the planner.

        Raises:
            pickle.UnpicklingError: The restricted unpickler refuses it.

        """
        what = f"{item.storage_index.fqn!r} of {self._folder}"
        layout.unpickled(value.getvalue(), what, weights_only=True)
        self._planner.load_bytes(item, value)
