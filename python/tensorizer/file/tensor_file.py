"""Loads of the tensors of an open file, for all functions that load."""

from __future__ import annotations

import itertools
import mmap as memory_maps
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import torch

from .._native import TensorIterator, announce, split_tensor_memory
from ..tensors import devices, fake_mode
from ..tensors.handles import are_plain, cast_dtype, dtype_of, lend, take
from .checkpoint import Checkpoint, SlicedCheckpoint
from .open_file import OpenFile

#: Bytes loaded at a time if torch then casts each tensor, or copies it to another device.
_BATCH_BYTES = 256 << 20
_CPU = torch.device("cpu")

#: The device of all tensors of a load, or that of each.
Places: TypeAlias = "torch.device | Sequence[torch.device]"
#: The keys of tensors: numbers or names.
_Key = TypeVar("_Key", int, str)


class TensorFile(OpenFile):
    """An open file, whose tensors can be loaded; see :class:`OpenFile` for its arguments."""

    def load(
        self, numbers: Sequence[int], device: Places, verify: str | None = None
    ) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Yield ``(number, tensor, module index)`` of tensors, in their final dtype.

        All are on one device, or each on its own. The dtype is ``dtype`` for floating-point tensors
        if that was given, and else the file's.
        """
        start = 0
        for batch in self._batches(numbers, device):
            end = start + len(batch)
            of_batch = device if isinstance(device, torch.device) else device[start:end]
            tensors, modules = self.read(batch, of_batch, verify)
            yield from zip(batch, self.placed(tensors, batch, of_batch), modules, strict=True)
            start = end

    def load_one(self, number: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return a tensor, in the form in which :meth:`load` yields it, and its module index."""
        if self._checkpoint is not None or not self._unchanged(device) or fake_mode.is_active():
            ((_, tensor, module),) = self.load([number], device)
            return tensor, module
        reader, one = self.reader, [number]
        handle, (module,) = reader.load(
            one,
            verify=self.verify,
            readers=self._num_readers,
            map=self.maps,
            devices=[devices.number(device)],
            separate_memory=self._clone,
        )
        (tensor,) = take(handle)
        self._read[0] += min(tensor.nbytes, reader.data_len(one))
        return tensor, module

    def read(
        self, numbers: Sequence[int], device: Places, verify: str | None = None
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors in the file's dtype, and their module indices.

        They are on their devices if the native code supports these, and else on the CPU.
        """
        if self._checkpoint is not None or (numbers and fake_mode.is_active()):
            by_device = _by_device(numbers, device)
            found = {
                number: tensor
                for one, some in by_device.items()
                for number, tensor in zip(some, self._read_on(some, one, verify), strict=True)
            }
            return [found[number] for number in numbers], [0] * len(numbers)
        handle, modules = self.reader.load(
            numbers,
            verify=verify or self.verify,
            readers=self._num_readers,
            map=self.maps,
            devices=_native_numbers(device),
            separate_memory=self._clone,
        )
        tensors = take(handle)
        # In the file, a sliced tensor has more bytes, and a tensor of the meta device fewer.
        size = sum(tensor.nbytes for tensor in tensors)
        self._read[0] += min(size, self.reader.data_len(numbers))
        return tensors, modules

    def _read_on(
        self, numbers: Sequence[int], device: torch.device, verify: str | None
    ) -> list[torch.Tensor]:
        """Return tensors of a checkpoint, or of ``FakeTensorMode``, for which nothing is read."""
        if self._checkpoint is not None and numbers and fake_mode.is_active():
            return self._checkpoint.without_data(numbers, device)
        if self._checkpoint is not None:
            tensors, read = self._checkpoint.load(
                numbers,
                device,
                verify=verify or self.verify,
                readers=self._num_readers,
                map=self.maps,
                separate_memory=self._clone,
                shared=self.keeps_shared,
            )
            self._read[0] += read
            return tensors
        described = self.reader.describe_all(list(numbers))
        return [
            torch.empty(shape, dtype=dtype_of(dtype), device=device) for dtype, shape in described
        ]

    def iterate(
        self,
        numbers: Sequence[int],
        device: torch.device,
        *,
        buffer_bytes: int,
        ready: bool,
        complete: bool = False,
        readers: int | None = None,
    ) -> TensorIterator:
        """Begin to load tensors one by one, in the file's dtype, each in memory of its own.

        They go to the device if the native code supports it. At most ``buffer_bytes`` bytes of them
        are held. They come in the order of their data in the file, or as they are ``ready``. They
        can be used on the stream that is current then; if they are to be ``complete``, on all
        streams of the device, because their copies have ended. ``readers`` overrides the number of
        readers of the file.
        """
        return self.reader.iterate(
            numbers,
            verify=self.verify,
            readers=readers or self._num_readers,
            device=devices.number(device),
            buffer_bytes=buffer_bytes,
            ready=ready,
            complete=complete,
        )

    def refuse_without_data(self, numbers: Sequence[int]) -> None:
        """Refuse tensors of a checkpoint that were saved without data.

        Raises:
            NotImplementedError: A tensor was saved so.

        """
        if self._checkpoint is not None:
            self._checkpoint.refuse_without_data(numbers)

    def fill(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[int], verify: str | None = None
    ) -> list[int]:
        """Fill existing tensors in place; return their module indices.

        Tensors of ``FakeTensorMode`` have nothing to fill.
        """
        if any(map(fake_mode.is_fake, tensors)):
            return [0] * len(numbers)
        direct = list(zip(tensors, numbers, strict=True))
        if self._checkpoint is not None:
            direct = self._fill_strided(direct, self._checkpoint, verify)
        plain = [tensor for tensor, _ in direct]
        chosen = [number for _, number in direct]
        handle = lend(plain if are_plain(plain) else [tensor.detach() for tensor in plain])
        modules = self.reader.load_into(
            handle, chosen, verify=verify or self.verify, readers=self._num_readers
        )
        self._read[0] += sum(tensor.nbytes for tensor in plain)
        return modules if len(direct) == len(numbers) else [0] * len(numbers)

    def _fill_strided(
        self,
        pairs: Sequence[tuple[torch.Tensor, int]],
        checkpoint: Checkpoint | SlicedCheckpoint,
        verify: str | None,
    ) -> list[tuple[torch.Tensor, int]]:
        """Fill the tensors whose bytes are not in order in the file; return the other pairs."""
        for tensor, number in pairs:
            if checkpoint.strided(number):
                (loaded,), _ = self.read([number], tensor.device, verify)
                tensor.detach().copy_(loaded)
        return [pair for pair in pairs if not checkpoint.strided(pair[1])]

    def can_fill_on(self, device: torch.device) -> bool:
        """Tell whether tensors on a device can be filled in place."""
        direct = device.type == "cpu" or devices.is_native(device)
        return direct and not self.maps

    def _unchanged(self, device: Places) -> bool:
        """Tell whether loaded tensors are used on their devices without a further copy."""
        return self.dtype is None and all(
            one.type == "cpu" or devices.is_native(one) for one in _all(device)
        )

    def _batches(self, numbers: Sequence[int], device: Places) -> Iterator[Sequence[int]]:
        """Split a load whose tensors are copied once more, to bound the bytes held twice."""
        if self._unchanged(device):
            if numbers:
                yield numbers
            return
        length = self.length_of(numbers)
        most = self.reserve_memory(_BATCH_BYTES, numbers, length, device)
        yield from self.in_batches(numbers, length, most)

    def length_of(self, numbers: Sequence[int]) -> Callable[[int], int]:
        """Return a function of the bytes that each of some tensors has in memory."""
        lens = self.reader.memory_lens(numbers)
        return dict(zip(numbers, lens, strict=True)).__getitem__

    def in_batches(
        self, numbers: Sequence[int], length: Callable[[int], int], most: int
    ) -> Iterator[list[int]]:
        """Split tensors as :func:`in_batches` does, for loads that count as one call to a cache."""
        announcement = announce(self.reader, numbers)
        yield from in_batches(numbers, length, most)
        del announcement

    def reserve_memory(
        self,
        wanted: int,
        numbers: Iterable[int],
        length: Callable[[int], int],
        device: Places = _CPU,
        *,
        min_memory: int = 0,
        reserved: int = 0,
    ) -> int:
        """Reserve a part of the memory limit for tensors that are held, and return its bytes.

        Args:
            wanted: The most bytes of tensors.
            numbers: The tensors.
            length: A function that returns the bytes of one.
            device: The device that they are loaded to, or that of each.
            min_memory: The fewest bytes to leave beside them.
            reserved: Bytes of the limit that are reserved for something else.

        Raises:
            ValueError: The limit is too small for the largest of them.

        """
        largest = max(map(length, numbers), default=0)
        reader = max(min_memory, self.min_memory(device))
        most, not_readers = split_tensor_memory(
            self.memory_limit, wanted, largest, reader, reserved
        )
        self.reader.limit_memory(self.memory_limit, not_readers)
        return most

    def min_memory(self, device: Places = _CPU, *, parts: bool = False) -> int:
        """Return the smallest memory limit with which tensors, or parts of them, can be read."""
        return self.reader.minimum_memory(parts, any(map(devices.is_native, _all(device))))

    def placed(
        self, tensors: list[torch.Tensor], numbers: Sequence[int], device: Places
    ) -> Iterable[torch.Tensor]:
        """Return tensors on the requested devices and in the requested dtype, one by one."""
        if self._unchanged(device):
            return tensors
        of_each = itertools.repeat(device) if isinstance(device, torch.device) else device
        return map(self._cast, tensors, numbers, of_each)

    def _cast(self, tensor: torch.Tensor, number: int, device: torch.device) -> torch.Tensor:
        wanted = cast_dtype(tensor.dtype, self.dtype)
        there = tensor.device.type == device.type and device.index in (None, tensor.device.index)
        if there and wanted is tensor.dtype:
            # It may share its storage with others; ``to()`` copies it if the device has no index.
            return tensor
        unchanged = wanted is tensor.dtype or device.type != "cpu" or fake_mode.is_fake(tensor)
        if unchanged or tensor.numel() == 0 or self.reader.data_len([number]) > 0:
            return tensor.to(device, wanted)
        return _zeros(tensor.shape, wanted)


def _all(device: Places) -> set[torch.device]:
    """Return the different devices of a load."""
    return {device} if isinstance(device, torch.device) else set(device)


def _native_numbers(device: Places) -> list[int]:
    """Return the native module's number for one device, or for that of each tensor."""
    if isinstance(device, torch.device):
        return [devices.number(device)]
    known = {one: devices.number(one) for one in set(device)}
    return [known[one] for one in device]


def _by_device(numbers: Sequence[int], device: Places) -> dict[torch.device, Sequence[int]]:
    """Return the tensors of each device."""
    if isinstance(device, torch.device):
        return {device: numbers}
    found: dict[torch.device, list[int]] = {}
    for number, one in zip(numbers, device, strict=True):
        found.setdefault(one, []).append(number)
    return dict(found)


def in_batches(
    numbers: Iterable[_Key], length: Callable[[_Key], int], most: int
) -> Iterator[list[_Key]]:
    """Split tensors into lists of at most ``most`` bytes together, or of one longer tensor."""
    batch: list[_Key] = []
    size = 0
    for number in numbers:
        if batch and size + length(number) > most:
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += length(number)
    if batch:
        yield batch


def _zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take no memory until they are written to.

    The system maps one page of zeros for all of them. A file of some bytes may name a tensor of any
    size.
    """
    size = shape.numel() * dtype.itemsize
    try:
        memory = memory_maps.mmap(-1, size, memory_maps.MAP_PRIVATE)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size} bytes for zeros: {error}") from error
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)
