"""The short way: one call to load a file, one to save."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._types import FilterFuncType, Name
from .arguments import resolve_device
from .encryption import DecryptionParams, EncryptionParams
from .tensor_file import TensorFile
from .writer import TensorSerializer


def load(
    uri: str | os.PathLike[Any] | Any,
    device: torch.device | str | None = None,
    *,
    names: Iterable[Name] | None = None,
    dtype: torch.dtype | None = None,
    verify_hash: bool | str = False,
    num_readers: int | None = None,
    mmap: bool = False,
    encryption: DecryptionParams | None = None,
    clone: bool = False,
    filter_func: FilterFuncType | None = None,
) -> dict[Name, torch.Tensor]:
    """Load the tensors of a file.

    Args:
        uri: What :class:`TensorDeserializer` opens.
        device: Where the tensors go; None for torch's default device.
        names: Load only these, and return them in this order. Those of nested structures are
            tuples of keys and indices, or in their stored form: U+001E and a JSON array.
        dtype: Cast floating-point tensors.
        verify_hash: Compare every tensor with the hashes in the file; ``"crc32"`` with the cheap
            one only.
        num_readers: Threads that read at once.
        mmap: Whether to map a file instead of reading it; see :class:`TensorDeserializer`.
        encryption: What an encrypted file is decrypted with.
        clone: On CUDA, give each tensor a storage of its own; without it ``torch.save`` of one that
            is small writes others along. See :class:`TensorDeserializer`.
        filter_func: Called with each tensor's name; those for which it returns something false are
            left out.

    Returns:
        Plain tensors (not parameters) by name, in the order of the file. Names of nested
        structures are tuples of keys and indices. :func:`save` takes what this returns.

    Raises:
        KeyError: The file has no tensor of one of the names.
        OSError, ValueError, HashMismatchError, CryptographyError: See
            :class:`TensorDeserializer`.

    """
    place = resolve_device(torch.get_default_device() if device is None else device)
    with TensorFile(
        uri,
        dtype=dtype,
        num_readers=num_readers,
        verify_hash=verify_hash,
        encryption=encryption,
        mmap=mmap,
        clone=clone,
    ) as file:
        name_of = file.reader.name
        numbers: dict[Name, int]
        if names is None:
            numbers = {name_of(number): number for number in range(len(file))}
        else:
            numbers = {name: _find(file, name) for name in names}
        if filter_func is not None:
            numbers = {name: n for name, n in numbers.items() if filter_func(name_of(n))}
        in_order = sorted(set(numbers.values()))
        loaded = {number: tensor for number, tensor, _ in file.load(in_order, place)}
    return {name: loaded[number] for name, number in numbers.items()}


def save(
    tensors: Mapping[Any, Any],
    uri: str | os.PathLike[Any] | Any,
    *,
    alignment: int = 64,
    encryption: EncryptionParams | None = None,
    hashes: str = "all",
) -> None:
    """Save tensors to a file, atomically if it is a path.

    Args:
        tensors: Tensors by name. A nested structure of dicts and lists is saved as such; what
            :func:`load` returns is, too.
        uri: What :class:`TensorSerializer` opens.
        alignment: Each tensor's data begin at a multiple of this many bytes in the file.
        encryption: A key to encrypt the tensors' data with.
        hashes: Which hashes of each tensor to store; see :class:`TensorSerializer`.

    Raises:
        OSError, TypeError, ValueError, NotImplementedError: See :class:`TensorSerializer`.

    """
    with TensorSerializer(uri, alignment=alignment, encryption=encryption, hashes=hashes) as file:
        file.write_state_dict(tensors)


def _find(file: TensorFile, name: Name) -> int:
    """Return the number of a tensor, whose name may be given in the form that files store."""
    path: Any = name
    if isinstance(name, str) and name.startswith("\x1e"):
        with contextlib.suppress(ValueError, RecursionError):
            path = json.loads(name[1:])
        steps = path if isinstance(path, list) and path else [None]
        if not all(isinstance(step, (str, int)) and not isinstance(step, bool) for step in steps):
            raise KeyError(f"Tensor {name!r} not found in {file.reader.uri}")
        path = tuple(path)
    number = file.reader.find(path)
    if number is None:
        raise KeyError(f"Tensor {name!r} not found in {file.reader.uri}")
    return number
