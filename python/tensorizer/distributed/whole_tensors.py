"""The tensors of a checkpoint as wholes, however many ranks have saved it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from .._types import VerifyHash
from ..file.encryption import DecryptionParams
from ..file.open_file import OpenFile
from ..file.progress import ProgressReporter
from ..tensors.sharding import Box
from . import layout
from .items import ItemLocation, ItemLocations

#: The most files open at a time: systems allow some 1000, and there is one for each rank.
_MOST_OPEN = 256


class WholeTensors:
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
        self._tensors: dict[str, dcp.TensorStorageMetadata] = {}
        self.objects: list[str] = []
        for name, item in metadata.state_dict_metadata.items():
            if isinstance(item, dcp.TensorStorageMetadata):
                self._tensors[name] = item
            else:
                self.objects.append(name)
        self.names = list(self._tensors)
        self.files = [layout.join(self._folder, file) for file in files]
        self._options: dict[str, Any] = {
            "encryption": encryption,
            "verify_hash": verify_hash,
            "progress": progress,
        }
        #: In the order of their last use; the most recently used is the last.
        self._open: dict[str, OpenFile] = {}
        try:
            # Open files early: one that is missing, or needs a key, fails before output is written.
            for file in files[: 0 if names_only else _MOST_OPEN]:
                self._file(file)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> WholeTensors:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _file(self, name: str) -> OpenFile:
        """Return an open file; the least recently used one is closed if too many are open."""
        file = self._open.pop(name, None)
        if file is None:
            while len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = OpenFile(layout.join(self._folder, name), **self._options)
        self._open[name] = file
        return file

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor."""
        tensor = self._tensors[name]
        return math.prod(tensor.size) * tensor.properties.dtype.itemsize

    def describe(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and shape of a tensor."""
        tensor = self._tensors[name]
        return tensor.properties.dtype, tensor.size

    def file_numbers(self) -> list[int]:
        """Return, for each part of each tensor, the index of its file in ``files``."""
        numbers = {file: number for number, file in enumerate(self.files)}
        found = []
        for name, tensor in self._tensors.items():
            for number, chunk in enumerate(tensor.chunks):
                location = self._locations[dcp.MetadataIndex(name, chunk.offsets, number)]
                found.append(numbers[layout.join(self._folder, location.file)])
        return found

    def load(self, names: Iterable[str], verify: str | None = None) -> Iterator[torch.Tensor]:
        """Yield tensors on the CPU; ``verify`` overrides the hashes that are compared."""
        for name in names:
            tensor = self._tensors[name]
            made = torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for number, chunk in enumerate(tensor.chunks):
                ends = zip(chunk.offsets, chunk.sizes, strict=True)
                box = Box(tuple((at, at + size) for at, size in ends), tuple(chunk.offsets))
                location = self._locations[dcp.MetadataIndex(name, chunk.offsets, number)]
                self._load(location, box.of_part(made), verify)
            yield made

    def read_object(self, name: str, verify: str | None = None) -> None:
        """Read an object that is no tensor, to compare it with its hashes.

        Raises:
            HashMismatchError, CryptographyError, FormatError: It differs from what was saved.

        """
        location = self._locations[dcp.MetadataIndex(name)]
        file = self._file(location.file)
        file.read([layout.find(file, location)], torch.device("cpu"), verify)

    def is_encrypted(self) -> bool:
        """Tell whether its files are encrypted, without their key."""
        if not self.files:
            return False
        with OpenFile(self.files[0], key_needed=False) as file:
            return file.reader.encrypted

    def _load(self, location: ItemLocation, view: torch.Tensor, verify: str | None) -> None:
        file = self._file(location.file)
        number = layout.find(file, location)
        if view.is_contiguous():
            file.fill([view], [number], verify)
        else:
            (loaded,), _ = file.read([number], torch.device("cpu"), verify)
            view.copy_(loaded)
