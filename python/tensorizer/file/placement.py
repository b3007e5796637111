"""The devices of a load's tensors."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TypeAlias

import torch

from ..tensors import devices

#: The device of all tensors of a load, or that of each.
Places: TypeAlias = "torch.device | Sequence[torch.device]"


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
