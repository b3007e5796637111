"""From the tensors of an open file to tensors on a device."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Iterator, Sequence

import torch

from .._native import Reader
from ..tensors import devices
from ..tensors.exchange import cast_dtype, lend, take

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
        return self._dtype is None and (device.type == "cpu" or devices.is_native(device))

    def placed(
        self, tensors: list[torch.Tensor], numbers: Sequence[int], device: torch.device
    ) -> Iterable[torch.Tensor]:
        """Return tensors on a device and in the dtype that was asked for, one by one."""
        if self._unchanged(device):
            return tensors
        return map(self._cast, tensors, numbers, itertools.repeat(device))

    def _cast(self, tensor: torch.Tensor, number: int, device: torch.device) -> torch.Tensor:
        wanted = cast_dtype(tensor.dtype, self._dtype)
        unchanged = wanted is tensor.dtype or device.type != "cpu"
        if unchanged or tensor.numel() == 0 or self._reader.data_len([number]) > 0:
            return tensor.to(device, wanted)
        return _zeros(tensor.shape, wanted)

    def read(
        self, numbers: Sequence[int], verify: str, device: torch.device
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors as they are in the file, and their module indices."""
        handle, modules = self._reader.load(
            numbers,
            verify=verify,
            readers=self._num_readers,
            map=self.maps,
            device=devices.number(device),
            apart=self._clone,
        )
        tensors = take(handle)
        self.bytes_read += self._reader.data_len(numbers)
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


def _zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory is the system's page of zeros until somebody writes to them.

    A file of some bytes may name a tensor of any size.
    """
    size = shape.numel() * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size} bytes for zeros: {error}") from error
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)
