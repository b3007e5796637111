"""The tensors of a file that a module holds already, by the hashes of the file before."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .._native import Reader
from .._types import Name
from ..modules import state
from ..tensors import sharding
from ..tensors.handles import are_plain

#: A tensor of a file for a module: its name, its number, the tensor that is there, and the dtype
#: that a load would give it.
Row = tuple[Name, int, torch.Tensor | None, torch.dtype]


class _Held(NamedTuple):
    """A tensor as a load left it in a module.

    The reader is closed, and still has the headers that it has read. Torch counts the changes in
    place, as the version, except those through ``data``.
    """

    reader: Reader
    number: int
    tensor: weakref.ref[torch.Tensor]
    address: int
    version: int

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is another one, or was changed since.

        One that has a gradient is being trained, and fused optimizers are not counted.
        """
        local = sharding.local_of(tensor)
        if self.tensor() is not tensor or local.is_inference() or tensor.grad is not None:
            return True
        return (self.address, self.version) != (local.data_ptr(), _version(tensor, local))

    def sha256(self) -> str | None:
        """Return the hash that its file had; None if its header was not read, or has none."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            return dict(self.reader.hashes([self.number])[0]).get("SHA256")
        return None


#: By module, and by name in the file.
_held: weakref.WeakKeyDictionary[torch.nn.Module, dict[Name, _Held]] = weakref.WeakKeyDictionary()


def sha256_of(reader: Reader, numbers: Sequence[int]) -> list[str | None]:
    """Return the SHA-256 of tensors, which cover names, dtypes and shapes too; None without one.

    Their headers are read, one by one, unless they were read before.
    """
    if reader.format != "tensors" or not reader.seekable:
        return [None] * len(numbers)
    return [dict(hashes).get("SHA256") for hashes in reader.hashes(numbers)]


def find_unchanged(
    m: torch.nn.Module, reader: Reader, rows: Sequence[Row], device: torch.device
) -> set[int]:
    """Return the numbers of the tensors that a module holds with the same bytes.

    The device is that which a load would give them. Tensors that were replaced or changed since are
    not among them, as far as torch has counted the changes.
    """
    held = _held.get(m, {})
    now = sha256_of(reader, [number for _, number, *_ in rows])
    same = {
        number
        for (name, number, tensor, dtype), sha256 in zip(rows, now, strict=True)
        if (before := held.get(name)) is not None
        and sha256 is not None
        and tensor is not None
        and (sharding.is_sharded(tensor) or (tensor.dtype is dtype and tensor.device == device))
        and not before.has_changed(tensor)
        and sha256 == before.sha256()
    }
    # Of tensors that share memory, one that changes would change the others.
    there = [(number, tensor) for _, number, tensor, _ in rows if tensor is not None]
    shared = {number for number, _ in there}
    shared -= {number for number, _ in state.without_overlaps(there)}
    if not shared <= same:
        same -= shared
    if not same and not any(before.sha256() for before in held.values()):
        reader.report_fallback("all tensors were read, as no hashes are known of those before")
    elif not any(now):
        reader.report_fallback(f"all tensors were read, as {reader.uri} has no SHA-256 of them")
    return same


def forget(m: torch.nn.Module, names: Iterable[Name]) -> None:
    """Forget tensors of a module that a load is about to change."""
    held = _held.get(m, {})
    for name in names:
        held.pop(name, None)


def remember(
    m: torch.nn.Module,
    reader: Reader,
    names: Iterable[Name],
    numbers: Iterable[int],
    tensors: Sequence[torch.Tensor | None],
) -> None:
    """Remember the tensors of a module as a load has left them."""
    held = _held.setdefault(m, {})
    plain = are_plain(tensors)
    # Inference tensors have no versions.
    with contextlib.suppress(RuntimeError):
        for name, number, tensor in zip(names, numbers, tensors, strict=True):
            if tensor is not None:
                local = tensor if plain else sharding.local_of(tensor)
                ref = weakref.ref(tensor)
                address, version = local.data_ptr(), _version(tensor, local)
                held[name] = _Held(reader, number, ref, address, version)


def _version(tensor: torch.Tensor, local: torch.Tensor) -> int:
    """Return a number that grows with changes in place, of a DTensor or of its local part."""
    return tensor._version + local._version
