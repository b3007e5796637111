"""Folders that others than :class:`Writer` have saved: torch's own, and of safetensors files."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from .._errors import FormatError
from ..streams.addresses import is_address
from . import layout

#: The file of torch's own writer that says where each item is.
_METADATA = ".metadata"
#: Classes that such a file names, by their modules.
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


def reader_of(folder: str, weights_only: bool) -> StorageReader | None:
    """Return torch's reader of a folder that torch or others have saved; None if it is none.

    Args:
        folder: A local folder.
        weights_only: Read the pickle of torch's metadata by a restricted unpickler.

    """
    if is_address(folder) or not Path(folder).is_dir():
        return None
    if (Path(folder) / _METADATA).exists():
        return _TorchReader(folder) if weights_only else FileSystemReader(folder)
    if any(Path(folder).glob("*.safetensors")):
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        reader: StorageReader = HuggingFaceStorageReader(folder)
        return reader
    return None


class _TorchReader(FileSystemReader):
    """torch's own reader, whose metadata can run no code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return what the checkpoint holds.

        Raises:
            pickle.UnpicklingError: It names a class that is none of torch's metadata.
            FormatError: It is damaged, or names a file outside of its folder.

        """
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            found = _Unpickler(io.BytesIO(Path(path).read_bytes())).load()
        except (OSError, pickle.UnpicklingError) as error:
            if isinstance(error, pickle.UnpicklingError):
                raise pickle.UnpicklingError(f"{path}: {error}") from error
            raise
        except Exception as error:
            raise FormatError(f"{path} is no metadata of torch: {error!r}") from error
        if not isinstance(found, dcp.Metadata) or not isinstance(found.storage_data, dict):
            raise FormatError(f"{path}: expected torch's Metadata, found {type(found).__name__}")
        for place in found.storage_data.values():
            name = getattr(place, "relative_path", None)
            if not isinstance(name, str) or Path(name).name != name or name == "..":
                raise FormatError(f"{path}: expected the name of a file beside it, found {name!r}")
        about = getattr(found, "storage_meta", None) or dcp.StorageMeta()
        about.load_id = self.load_id
        found.storage_meta = about
        return found


class _Unpickler(pickle.Unpickler):
    """Takes the classes of torch's metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, (torch.dtype, torch.layout, torch.memory_format)):
            return dtype
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which could run code: where the checkpoint is trusted, "
            "Reader(weights_only=False) reads it"
        )


class Checking:
    """A planner that is given no object which torch's restricted unpickler refuses.

    Args:
        planner: The planner, which unpickles without restriction.
        folder: The folder, for messages.

    """

    def __init__(self, planner: LoadPlanner, folder: str | os.PathLike[str]) -> None:
        self._planner, self._folder = planner, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        """Hand an object to the planner.

        Raises:
            pickle.UnpicklingError: The restricted unpickler refuses it.

        """
        data = value.getvalue()
        what = f"{item.storage_index.fqn!r} of {os.fsdecode(self._folder)}"
        layout.unpickled(data, what, weights_only=True)
        self._planner.load_bytes(item, io.BytesIO(data))
