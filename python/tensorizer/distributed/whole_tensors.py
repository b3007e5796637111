"""The tensors of a checkpoint as wholes, however many ranks have saved it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from .._types import VerifyHash
from ..file.encryption import DecryptionParams
from ..file.open_file import OpenFile
from ..file.progress import ProgressReporter
from . import layout
from .items import ItemLocation, ItemLocations

#: The most files open at a time: systems allow some 1000, and there is one for each rank.
_MOST_OPEN = 256


class WholeTensors(AbstractContextManager["WholeTensors"]):
    """The tensors of a checkpoint, by the names that its planner gave them.

    Args:
        uri: The folder.
        encryption: The key or passphrase of encrypted files.
        verify_hash: Compare tensors with the hashes in their files.
        names_only: Open no file before a tensor is read, so that no key is needed.
        progress: Reports the bytes that are loaded.

    Raises:
        OSError, FormatError, CryptographyError: See :class:`tensorizer.distributed.Reader`.

    Attributes:
        names: The names of the tensors.
        objects: The names of objects that are no tensors; they are not loaded.
        files: The files of its ranks.

    """

    def __init__(
        self,
        uri: str | os.PathLike[Any],
        encryption: DecryptionParams | None = None,
        verify_hash: VerifyHash = False,
        names_only: bool = False,
        progress: ProgressReporter | None = None,
    ) -> None:
        self._folder = layout.folder_of(uri)
        metadata, files = layout.read(self._folder)
        self._locations: ItemLocations = metadata.storage_data
        self._tensors = {
            name: item
            for name, item in metadata.state_dict_metadata.items()
            if isinstance(item, dcp.TensorStorageMetadata)
        }
        self.names = list(self._tensors)
        self.objects = [name for name in metadata.state_dict_metadata if name not in self._tensors]
        self.files = [layout.join(self._folder, file) for file in files]
        opened = functools.partial(
            OpenFile, encryption=encryption, verify_hash=verify_hash, progress=progress
        )
        #: Opens a file, and keeps it until too many others are open; then it is closed.
        self._file = functools.lru_cache(_MOST_OPEN)(opened)
        # Open files early: one that is missing, or needs a key, fails before output is written.
        for file in self.files[: 0 if names_only else _MOST_OPEN]:
            self._file(file)

    def __exit__(self, *_: object) -> None:
        self._file.cache_clear()

    def _location(self, index: dcp.MetadataIndex) -> tuple[str, ItemLocation]:
        """Return the file of a part or an object, and its location there."""
        location = self._locations[index]
        return layout.join(self._folder, location.file), location

    def _parts(self, name: str) -> Iterator[tuple[dcp.ChunkStorageMetadata, str, ItemLocation]]:
        """Yield the parts of a tensor, each with its file and its location there."""
        for number, chunk in enumerate(self._tensors[name].chunks):
            yield chunk, *self._location(dcp.MetadataIndex(name, chunk.offsets, number))

    def describe(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and shape of a tensor."""
        tensor = self._tensors[name]
        return tensor.properties.dtype, tensor.size

    def file_numbers(self) -> list[int]:
        """Return, for each part of each tensor, the index of its file in ``files``."""
        numbers = {file: number for number, file in enumerate(self.files)}
        return [numbers[file] for name in self.names for _, file, _ in self._parts(name)]

    def load(self, names: Iterable[str], verify: str | None = None) -> Iterator[torch.Tensor]:
        """Yield tensors on the CPU; ``verify`` overrides the hashes that are compared."""
        for name in names:
            dtype, size = self.describe(name)
            made = torch.empty(size, dtype=dtype)
            for chunk, path, location in self._parts(name):
                ends = zip(chunk.offsets, chunk.sizes, strict=True)
                view = made[tuple(slice(at, at + length) for at, length in ends)]
                file = self._file(path)
                number = layout.find(file, location)
                if view.is_contiguous():
                    file.fill([view], [number], verify)
                else:
                    (loaded,), _ = file.read([number], torch.device("cpu"), verify)
                    view.copy_(loaded)
            yield made

    def read_object(self, name: str, verify: str | None = None) -> None:
        """Read an object that is no tensor, to compare it with its hashes.

        Raises:
            HashMismatchError, CryptographyError, FormatError: It differs from what was saved.

        """
        path, location = self._location(dcp.MetadataIndex(name))
        file = self._file(path)
        file.read([layout.find(file, location)], torch.device("cpu"), verify)
