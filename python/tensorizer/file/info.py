"""The description of a file: its tensors and metadata, without tensor data."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from .._errors import FormatError
from .._native import Call
from .._types import Name
from .encryption import DecryptionParams
from .open_file import OpenFile


class _Picklable:
    """A frozen dataclass with read-only mappings, which pickle does not know."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, with plain dicts."""
        fields = vars(self).items()
        return {name: dict(v) if isinstance(v, MappingProxyType) else v for name, v in fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields."""
        read_only = {n: MappingProxyType(v) for n, v in state.items() if isinstance(v, dict)}
        vars(self).update({**state, **read_only})


@dataclass(frozen=True)
class TensorInfo(_Picklable):
    """A tensor of a file.

    Attributes:
        name: Its name; a tuple of keys and indices in a nested structure.
        dtype: The name of its dtype without ``torch.``: one that torch may lack, such as
            ``float6_e2m3fn_x4``.
        shape: Its dimensions.
        nbytes: Bytes that it takes in memory.
        file: The path or address of the file that holds it.
        hashes: Its hashes in the file, ``"CRC32"`` in decimal and ``"SHA256"`` in hexadecimal; None
            if they were not requested.

    """

    name: Name
    dtype: str
    shape: torch.Size
    nbytes: int
    file: str
    hashes: Mapping[str, str] | None = None


@dataclass(frozen=True)
class FileInfo(_Picklable):
    """A file of tensors, or a checkpoint of several.

    Attributes:
        uri: The path or address.
        format: ``"tensors"``, ``"safetensors"`` or ``"torch"``.
        version: The data version of a ``.tensors`` file; None for other formats.
        encrypted: True if the tensors' data are encrypted.
        files: The path or address of each file: several for the shards of a checkpoint.
        tensors: The tensors by name, in the order of the file.
        metadata: Strings by name, stored with the tensors. Only a manifest authenticates them; it
            is checked if ``encryption`` is given. If the metadata of a ``.tensors`` file are
            damaged, this is empty, with a warning, because its tensors may be intact.
        nbytes: Bytes that all tensors take in memory.

    """

    uri: str
    format: str
    version: int | None
    encrypted: bool
    files: tuple[str, ...]
    tensors: Mapping[Name, TensorInfo] = field(repr=False)
    metadata: Mapping[str, str]
    nbytes: int


def _metadata(file: OpenFile) -> dict[str, str]:
    try:
        return dict(file.reader.metadata or ())
    except FormatError as error:
        warnings.warn(f"the file is shown without its metadata: {error}", stacklevel=3)
        return {}


def info(
    uri: str | os.PathLike[Any] | Any,
    *,
    hashes: bool = False,
    encryption: DecryptionParams | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> FileInfo:
    """Return a description of a file, without reading the data of its tensors.

    Args:
        uri: The file, as for :class:`tensorizer.TensorDeserializer`. A file object stays open.
        hashes: Also read the hashes of every tensor, which are stored in front of its data.
        encryption: A key or passphrase to check the seal of an encrypted file. Names and shapes
            need no key.
        headers: Header fields of the requests to a server.
        timeout: The seconds that the call may take; then it is a ``TimeoutError``. None for no
            limit.

    Raises:
        OSError, ValueError, CryptographyError: See :class:`tensorizer.TensorDeserializer`.

    """
    with (
        Call("info", timeout),
        OpenFile(uri, encryption=encryption, key_needed=False, headers=headers) as file,
    ):
        reader = file.reader
        every = range(len(file))
        files = tuple(reader.files())
        found = reader.hashes(every) if hashes else [None] * len(file)
        tensors: dict[Name, TensorInfo] = {}
        lens = reader.memory_lens(every)
        rows = zip(reader.names(every), lens, reader.file_numbers(), found, strict=True)
        for number, (name, nbytes, place, of_tensor) in enumerate(rows):
            dtype, shape, _ = reader.describe(number)
            known = None if of_tensor is None else MappingProxyType(dict(of_tensor))
            tensors[name] = TensorInfo(name, dtype, torch.Size(shape), nbytes, files[place], known)
        return FileInfo(
            uri=reader.uri,
            format=reader.format,
            version=reader.version,
            encrypted=reader.encrypted,
            files=files,
            tensors=MappingProxyType(tensors),
            metadata=MappingProxyType(_metadata(file)),
            nbytes=sum(lens),
        )
