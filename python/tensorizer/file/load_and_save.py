"""The short way: one call to load a file, one to save."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._types import Name
from .encryption import DecryptionParams, EncryptionParams
from .reader import TensorDeserializer
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

    Returns:
        Plain tensors (not parameters) by name, in the order of the file. Names of nested
        structures are tuples of keys and indices. :func:`save` takes what this returns.

    Raises:
        KeyError: The file has no tensor of one of the names.
        OSError, ValueError, HashMismatchError, CryptographyError: See
            :class:`TensorDeserializer`.

    """
    wanted = None if names is None else list(names)
    chosen = None if wanted is None else set(map(_stored, wanted))
    with TensorDeserializer(
        uri,
        torch.get_default_device() if device is None else device,
        None if chosen is None else lambda name: _stored(name) in chosen,  # type: ignore[arg-type]
        dtype,
        lazy_load=True,
        num_readers=num_readers,
        verify_hash=verify_hash,
        mmap=mmap,
        encryption=encryption,
        clone=clone,
    ) as file:
        loaded = dict(file._plain_tensors())
    if wanted is None:
        return loaded
    stored = {_stored(name): tensor for name, tensor in loaded.items()}
    missing = [name for name in wanted if _stored(name) not in stored]
    if missing:
        raise KeyError(f"Tensor {missing[0]!r} not found in {file._reader.uri}")
    return {name: stored[_stored(name)] for name in wanted}


def save(
    tensors: Mapping[Any, Any],
    uri: str | os.PathLike[Any] | Any,
    *,
    alignment: int = 64,
    encryption: EncryptionParams | None = None,
) -> None:
    """Save tensors to a file, atomically if it is a path.

    Args:
        tensors: Tensors by name. A nested structure of dicts and lists is saved as such; what
            :func:`load` returns is, too.
        uri: What :class:`TensorSerializer` opens.
        alignment: Each tensor's data begin at a multiple of this many bytes in the file.
        encryption: A key to encrypt the tensors' data with.

    Raises:
        OSError, TypeError, ValueError, NotImplementedError: See :class:`TensorSerializer`.

    """
    with TensorSerializer(uri, alignment=alignment, encryption=encryption) as file:
        file.write_state_dict(tensors)


def _stored(name: Name) -> str:
    if isinstance(name, str):
        return name
    return "\x1e" + json.dumps(list(name), separators=(",", ":"))
