"""Readers of checkpoint folders at an address that :class:`Writer` did not save."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .._errors import FormatError
from ..file.open_file import OpenFile
from ..streams.addresses import is_there
from ..streams.open import open_stream
from ..tensors.handles import dtype_of
from . import layout
from .read_into_planner import read_tensors


class AddressFileSystem(FileSystemBase):
    """A read-only file system of addresses, for torch's own reader of checkpoints."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[Any], mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        with open_stream(os.fspath(path), mode) as stream:
            yield stream  # type: ignore[misc]

    def concat_path(self, path: str | os.PathLike[Any], suffix: str) -> str:
        """Return the address of a file in a folder."""
        return layout.join(os.fspath(path), suffix)

    def init_path(self, path: str | os.PathLike[Any]) -> str:
        """Return the address of a folder."""
        return os.fspath(path)

    def exists(self, path: str | os.PathLike[Any]) -> bool:
        """Return True if there is a file."""
        return is_there(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[Any]) -> bool:
        """Tell whether the type is that of an address."""
        return isinstance(checkpoint_id, str)

    def rename(self, path: str | os.PathLike[Any], new_path: str | os.PathLike[Any]) -> None:
        """Raise ``io.UnsupportedOperation``."""
        raise _read_only_error()

    def mkdir(self, path: str | os.PathLike[Any]) -> None:
        """Raise ``io.UnsupportedOperation``."""
        raise _read_only_error()

    def rm_file(self, path: str | os.PathLike[Any]) -> None:
        """Raise ``io.UnsupportedOperation``."""
        raise _read_only_error()


def _read_only_error() -> io.UnsupportedOperation:
    return io.UnsupportedOperation("checkpoints in torch's format cannot be written to an address")


def read_part(stream: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """Return some bytes of a file, read by one request.

    Raises:
        FormatError: The file has fewer bytes, or has changed meanwhile.

    """
    size = stream.seek(0, os.SEEK_END)
    if offset < 0 or length < 0:
        raise FormatError(f"{stream.name}: expected an item of {length} bytes at {offset}")
    if offset + length > size:
        raise FormatError(
            f"{stream.name} has {size} bytes: expected an item of {length} from {offset}"
        )
    stream.seek(offset)
    data = stream.read(length)
    if len(data) != length:
        raise FormatError(f"{stream.name}: expected {length} bytes at {offset}, found {len(data)}")
    return io.BytesIO(data)


class ShardsReader(StorageReader):
    """Reads a model in one file, or in shards, as a checkpoint: each tensor is one chunk.

    Args:
        folder: The address of the folder that has the file, or the index of the shards.
        options: The arguments of :class:`OpenFile`.

    """

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__()
        self._uri = layout.join(folder, "")
        self._options = options
        self._metadata: dcp.Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[Any] | None = None) -> None:
        """Set another folder to read, if one is given."""
        if checkpoint_id:
            self._uri, self._metadata = layout.join(os.fspath(checkpoint_id), ""), None

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        """Return the metadata of the folder."""
        if self._metadata is None:
            self._metadata = self._read_metadata()
        return self._metadata

    def _read_metadata(self) -> dcp.Metadata:
        found: dict[str, Any] = {}
        with OpenFile(self._uri, **self._options) as file:
            for number in range(len(file)):
                dtype, shape, _ = file.reader.describe(number)
                size = torch.Size(shape)
                first = dcp.ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
                about = dcp.TensorProperties(dtype_of(dtype))
                name = str(file.reader.name(number))
                found[name] = dcp.TensorStorageMetadata(about, size, [first])
        return dcp.Metadata(found, storage_data={})

    def set_up_storage_reader(self, metadata: dcp.Metadata, *_: Any, **__: Any) -> None:
        """Do nothing: tensors are found by their names."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan of a rank."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of a rank, or its parts of them."""
        with OpenFile(self._uri, **self._options) as file:
            items = [(item, file.find(item.storage_index.fqn)) for item in plan.items]
            read_tensors(file, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[Any]) -> bool:
        """Tell whether the type is that of an address."""
        return isinstance(checkpoint_id, str)
