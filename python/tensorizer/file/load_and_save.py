"""The short way: one call to load a file, one to save."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._types import FilterFuncType, Name
from . import to_safetensors
from .arguments import resolve_device
from .encryption import DecryptionParams, EncryptionParams
from .slices import Index, Wanted
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
    slices: Mapping[Name, tuple[int, int, int] | Index] | None = None,
    out: Mapping[Name, torch.Tensor] | None = None,
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
        slices: Load only a part of some tensors, and read only its bytes: by name ``(dimension,
            start, end)``, or what goes into brackets, ``(slice(0, 10), ..., 3)``. See
            :class:`TensorSlice`.
        out: Fill these tensors, by name and wherever they are, instead of making new ones. They
            have the dtype and shape of what is loaded, and are contiguous. Without ``names``, only
            these are loaded. If the load fails half-way, they hold some of the new bytes.

    Returns:
        Plain tensors (not parameters) by name, in the order of the file. Names of nested
        structures are tuples of keys and indices. :func:`save` takes what this returns.

    Raises:
        KeyError: The file has no tensor of one of the names.
        IndexError, TypeError: A slice is none of its tensor.
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
        if names is None and out is not None:
            names = out
        numbers: dict[Name, int]
        if names is None:
            numbers = dict(zip(file.reader.names(range(len(file))), range(len(file)), strict=True))
        else:
            numbers = {name: file.find(name) for name in names}
        if filter_func is not None:
            numbers = {name: n for name, n in numbers.items() if filter_func(name_of(n))}
        wanted = Wanted(file, numbers, slices or {})
        if out is None:
            loaded = wanted.load(place)
        else:
            missing = [name for name in numbers if name not in out]
            if missing:
                raise KeyError(f"no tensor to load {missing[0]!r} into")
            if len(set(numbers.values())) < len(numbers):
                raise ValueError("two of the names to load into are those of one tensor")
            loaded = wanted.fill({numbers[name]: out[name] for name in numbers})
    return {name: loaded[number] for name, number in numbers.items()}


def save(
    tensors: Mapping[Any, Any],
    uri: str | os.PathLike[Any] | Any,
    *,
    alignment: int = 64,
    encryption: EncryptionParams | None = None,
    hashes: str = "all",
    format: str | None = None,
    metadata: Mapping[str, str] | None = None,
    clear_metadata: bool = False,
    max_shard_size: int | str | None = None,
) -> None:
    """Save tensors to a file, atomically if it is a path.

    Args:
        tensors: Tensors by name. A nested structure of dicts and lists is saved as such; what
            :func:`load` returns is, too.
        uri: What :class:`TensorSerializer` opens.
        alignment: Each tensor's data begin at a multiple of this many bytes in the file.
        encryption: A key to encrypt the tensors' data with.
        hashes: Which hashes of each tensor to store; see :class:`TensorSerializer`.
        format: ``"tensors"`` or ``"safetensors"``; None for the latter where ``uri`` is a path or
            an address that ends with ``.safetensors``. Such files hold tensors by name, which share
            no memory, and neither hashes nor encryption.
        metadata: Strings by name, which :func:`tensorizer.info` returns; see
            :class:`TensorSerializer`.
        clear_metadata: Whether an encrypted file may have metadata, which anybody can read in it.
        max_shard_size: Split a safetensors file that would have more bytes of tensors, as in
            ``5_000_000_000``, ``"5GB"`` or ``"4GiB"``: ``model.safetensors`` becomes
            ``model-00001-of-00002.safetensors`` and so on, with ``model.safetensors.index.json``,
            which is written last.

    Raises:
        FileExistsError: Shards would replace others, or be hidden by a file.
        OSError, TypeError, ValueError, NotImplementedError: See :class:`TensorSerializer`.

    """
    if to_safetensors.is_meant(uri, format):
        to_safetensors.refuse_options(alignment, encryption, hashes)
        to_safetensors.save_safetensors(tensors, uri, metadata, max_shard_size)
        return
    if max_shard_size is not None:
        raise ValueError("max_shard_size= is for safetensors files")
    with TensorSerializer(
        uri,
        alignment=alignment,
        encryption=encryption,
        hashes=hashes,
        metadata=metadata,
        clear_metadata=clear_metadata,
    ) as file:
        file.write_state_dict(tensors)
