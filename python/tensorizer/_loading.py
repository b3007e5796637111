"""From the tensors of an open file to tensors on a device."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence

import torch

from . import _device
from ._exchange import cast_dtype, lend, take
from ._native import Reader

#: Bytes loaded at a time where each tensor is then cast, or copied to another device by torch.
_BATCH_BYTES = 256 << 20


class Loader:
    """Loads tensors, given by number.

    Attributes:
        bytes_read: Bytes of tensor data read so far.
        maps: Whether tensors are used in place of their file.

    """

    def __init__(
        self,
        reader: Reader,
        dtype: torch.dtype | None,
        num_readers: int | None,
        maps: bool,
        clone: bool,
    ) -> None:
        self._reader = reader
        self._dtype = dtype
        self._num_readers = num_readers
        self.maps = bool(maps)
        self._clone = clone
        self.bytes_read = 0

    def _unchanged(self, device: torch.device) -> bool:
        """Tell whether tensors are used as they come, without a copy."""
        return self._dtype is None and (device.type == "cpu" or _device.is_native(device))

    def placed(self, tensors: list[torch.Tensor], device: torch.device) -> Iterable[torch.Tensor]:
        """Return tensors on a device and in the dtype that was asked for, one by one."""
        if self._unchanged(device):
            return tensors
        return (tensor.to(device, cast_dtype(tensor.dtype, self._dtype)) for tensor in tensors)

    def _zeros(self, number: int) -> torch.Tensor | None:
        """Return a tensor without data in the dtype that was asked for; None for others.

        Its memory is that of the system's page of zeros until somebody writes to it: a file of
        some bytes may name a tensor of any size.
        """
        size = self._reader.memory_len(number)
        if self._dtype is None or size == 0 or self._reader.data_len([number]) > 0:
            return None
        name, shape, _ = self._reader.describe(number)
        dtype: torch.dtype = getattr(torch, name)
        wanted = cast_dtype(dtype, self._dtype)
        memory = mmap.mmap(-1, size // dtype.itemsize * wanted.itemsize, mmap.MAP_PRIVATE)
        return torch.frombuffer(memory, dtype=wanted).reshape(shape)

    def read(
        self, numbers: Sequence[int], verify: str, device: torch.device
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors as they are in the file, and their module indices."""
        handle, modules = self._reader.load(
            numbers,
            verify=verify,
            readers=self._num_readers,
            map=self.maps,
            device=_device.number(device),
            apart=self._clone,
        )
        tensors = take(handle)
        self.bytes_read += sum(tensor.nbytes for tensor in tensors)
        if self._dtype is not None:
            for at, number in enumerate(numbers):
                zeros = self._zeros(number)
                tensors[at] = tensors[at] if zeros is None else zeros
        return tensors, modules

    def fill(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[int], verify: str
    ) -> list[int]:
        """Fill tensors that exist, in place; return module indices."""
        handle = lend([tensor.detach() for tensor in tensors])
        modules = self._reader.load_into(handle, numbers, verify=verify, readers=self._num_readers)
        self.bytes_read += sum(tensor.nbytes for tensor in tensors)
        return modules

    def batches(self, numbers: Sequence[int], device: torch.device) -> Iterator[Sequence[int]]:
        """Split a load whose tensors are copied once more, to bound what is held twice."""
        if self._unchanged(device):
            if numbers:
                yield numbers
            return
        batch: list[int] = []
        size = 0
        for number in numbers:
            length = self._reader.memory_len(number)
            if batch and size + length > _BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(number)
            size += length
        if batch:
            yield batch
