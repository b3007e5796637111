"""Readers of folders not saved by :class:`Writer`: torch's own format, and safetensors files."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from .._errors import FormatError
from ..streams.addresses import is_address, is_there
from ..streams.open import open_stream
from . import layout, remote

#: The file in which torch's own writer stores the position of each item.
_METADATA = ".metadata"
#: Classes of torch's metadata that the file may name, by module.
_CLASSES: dict[str, dict[str, type]] = {
    dcp.__name__: {
        name: getattr(dcp, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    },
    filesystem.__name__: {"_StorageInfo": filesystem._StorageInfo},
}
#: Functions that the file may name, and classes that it calls like functions.
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    (dcp.__name__, "_MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath")
    },
}
#: Types that the file may name, and whose attributes it cannot change.
_TYPES = {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): OrderedDict}


class FolderIdentity(NamedTuple):
    """A local folder, whose path leads through no links: these may change during a load."""

    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, folder: str) -> FolderIdentity | None:
        """Return that of a folder; None for an address, and if there is no folder."""
        path = Path(folder).resolve()
        if is_address(folder) or not path.is_dir():
            return None
        about = path.stat()
        return cls(str(path), about.st_dev, about.st_ino)

    def check(self) -> None:
        """Raise ``RuntimeError`` if the path leads to another folder now."""
        if FolderIdentity.of(self.path) != self:
            raise RuntimeError(
                f"{self.path} was replaced while the checkpoint was loaded from it, so tensors may "
                "be of two versions: load it again"
            )


def reader_of(
    folder: str, weights_only: bool, num_readers: int | None = None
) -> StorageReader | None:
    """Return a reader of a folder saved by torch or as safetensors files; None if it is neither.

    Args:
        folder: A path or an address.
        weights_only: Read the pickle of torch's metadata by a restricted unpickler.
        num_readers: Threads that read files at an address at once.

    """
    if is_address(folder):
        return _reader_of_address(folder, weights_only, num_readers)
    if not Path(folder).is_dir():
        return None
    if (Path(folder) / _METADATA).is_file():
        return (_RestrictedReader if weights_only else _TorchReader)(folder)
    if any(Path(folder).glob("*.safetensors")):
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        reader: StorageReader = HuggingFaceStorageReader(folder)
        return reader
    return None


def _reader_of_address(
    address: str, weights_only: bool, num_readers: int | None
) -> StorageReader | None:
    if is_there(layout.join(address, _METADATA)):
        return (_RestrictedReader if weights_only else _TorchReader)(address)
    shards = remote.ShardsReader(address, num_readers=num_readers)
    try:
        shards.read_metadata()
    except (FileNotFoundError, PermissionError):
        return None
    return shards


def _check_locations(metadata: str, locations: Iterable[Any]) -> None:
    """Check that every item is within a file beside torch's metadata.

    Raises:
        FormatError: An item is not.

    """
    sizes: dict[str, int | None] = {}
    is_remote = is_address(metadata)
    for location in locations:
        name = getattr(location, "relative_path", None)
        if type(name) is not str or "/" in name or "\0" in name or name in ("", ".", ".."):
            raise FormatError(f"{metadata}: expected the name of a file beside it, found {name!r}")
        if name not in sizes:
            # A file at an address is checked when it is read.
            sizes[name] = None if is_remote else layout.size_of(Path(metadata).parent / name)
        start, length = getattr(location, "offset", None), getattr(location, "length", None)
        if type(start) is not int or type(length) is not int or min(start, length) < 0:
            raise FormatError(
                f"{metadata}: expected an offset and a length in {name}, "
                f"found {start!r} and {length!r}"
            )
        size = sizes[name]
        if size is not None and start + length > size:
            raise FormatError(
                f"{metadata} has an item of {length} bytes from {start} in {name}, "
                f"which has {size} bytes"
            )


class _TorchReader(FileSystemReader):
    """torch's own reader, which reads addresses as well."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        if is_address(folder):
            # torch uses only the methods of this interface.
            self.fs = remote.AddressFileSystem()  # type: ignore[assignment]
            self.path = folder

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        if is_address(os.fspath(self.path)):
            return remote.read_part(file, sinfo.offset, sinfo.length)
        return super()._slice_file(file, sinfo)


class _RestrictedReader(_TorchReader):
    """A reader of torch's format whose metadata can run no code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return the metadata of the checkpoint.

        Raises:
            pickle.UnpicklingError: It names a class that does not belong to torch's metadata.
            FormatError: It is damaged, or names a file outside of its folder, or
                bytes beyond the end of a file.

        """
        path = os.fspath(self._get_metadata_path(kwargs.get("rank")))
        with open_stream(path) as stream:
            data = stream.read(layout.MOST_BYTES + 1)
        if len(data) > layout.MOST_BYTES:
            raise FormatError(f"{path} is too long: expected at most {layout.MOST_BYTES} bytes")
        try:
            found = _MetadataUnpickler(data).metadata()
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(f"{path}: {error}") from error
        except MemoryError:
            raise
        except Exception as error:
            raise FormatError(f"{path} is not a metadata file of torch: {error!r}") from error
        if not isinstance(found, dcp.Metadata) or not isinstance(found.storage_data, dict):
            raise FormatError(f"{path}: expected torch's Metadata, found {type(found).__name__}")
        _check_locations(path, found.storage_data.values())
        about = getattr(found, "storage_meta", None) or dcp.StorageMeta()
        about.load_id = self.load_id
        found.storage_meta = about
        return found


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that accepts the classes of torch's metadata, and no others.

    A pickle may set attributes of everything that it names. So it gets subclasses and wrapper
    functions that are made for this object alone. At the end, objects of the subclasses get the
    real classes.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._new_objects: list[Any] = []
        self._real_classes: dict[type, type] = {}
        self._stand_ins: dict[tuple[str, str], Any] = {}

    def metadata(self) -> Any:
        """Return the unpickled object."""
        found = self.load()
        for one in self._new_objects:
            real = self._real_classes.get(type(one))
            if real is not None:
                # Some classes are frozen.
                object.__setattr__(one, "__class__", real)
        return found

    def find_class(self, module: str, name: str) -> Any:
        key = module, name
        if key in _TYPES:
            return _TYPES[key]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, (torch.dtype, torch.layout, torch.memory_format)):
            return dtype
        if key not in self._stand_ins:
            self._stand_ins[key] = self._stand_in(module, name)
        return self._stand_ins[key]

    def _stand_in(self, module: str, name: str) -> Any:
        real, function = _CLASSES.get(module, {}).get(name), _FUNCTIONS.get((module, name))
        if real is None and function is None:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which could run code: where the checkpoint is trusted, "
                "Reader(weights_only=False) reads it"
            )
        if real is None:
            return lambda *args: function(*args) if function is not None else None
        new_objects = self._new_objects

        def new(cls: type, *_: Any, **__: Any) -> Any:
            one: Any = object.__new__(cls)
            new_objects.append(one)
            return one

        stand_in = type(real.__name__, (real,), {"__new__": new})
        self._real_classes[stand_in] = real
        return stand_in


class CheckingPlanner:
    """A planner wrapper that refuses objects which torch's restricted unpickler refuses.

    Args:
        planner: The planner, which unpickles without restriction.
        folder: The folder, for messages.

    """

    def __init__(self, planner: LoadPlanner, folder: str | os.PathLike[str]) -> None:
        self._planner, self._folder = planner, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        """Check an object, and hand it to the planner.

        Raises:
            pickle.UnpicklingError: The restricted unpickler refuses it.

        """
        data = value.getvalue()
        what = f"{item.storage_index.fqn!r} of {os.fsdecode(self._folder)}"
        layout.unpickled(data, what, weights_only=True)
        self._planner.load_bytes(item, io.BytesIO(data))
