"""The devices of a load's tensors, and the batches in which they are loaded."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import torch

from ..tensors import devices

#: The device of all tensors of a load, or that of each.
Places: TypeAlias = "torch.device | Sequence[torch.device]"
#: An item of a batch.
_Item = TypeVar("_Item")


def all_of(device: Places) -> set[torch.device]:
    """Return the different devices of a load."""
    return {device} if isinstance(device, torch.device) else set(device)


def native_numbers(device: Places) -> list[int]:
    """Return the native module's number for one device, or for that of each tensor."""
    if isinstance(device, torch.device):
        return [devices.number(device)]
    known = {one: devices.number(one) for one in set(device)}
    return [known[one] for one in device]


def by_device(numbers: Sequence[int], device: Places) -> dict[torch.device, Sequence[int]]:
    """Return the tensors of each device."""
    if isinstance(device, torch.device):
        return {device: numbers}
    found: dict[torch.device, list[int]] = {}
    for number, one in zip(numbers, device, strict=True):
        found.setdefault(one, []).append(number)
    return dict(found)


def in_batches(
    items: Iterable[_Item], length: Callable[[_Item], int], most: int
) -> Iterator[list[_Item]]:
    """Split items into lists of at most ``most`` bytes together, or of one longer item."""
    batch: list[_Item] = []
    size = 0
    for item in items:
        if batch and size + length(item) > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += length(item)
    if batch:
        yield batch


def zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take no memory until they are written to.

    The system maps one page of zeros for all of them. A file of some bytes may name a tensor of any
    size.
    """
    size = shape.numel() * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size} bytes for zeros: {error}") from error
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)
