"""Yields tensors of an open file as they arrive, while the next ones are being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from .._native import TensorIterator
from ..tensors import devices, fake_mode
from ..tensors.handles import copied, take
from .load_plan import LoadPlan


class ReadAhead(Iterator[list[tuple[int, torch.Tensor]]]):
    """Yields the wanted tensors of a file as lists of numbers and tensors; small ones together.

    Args:
        plan: Tensors, or parts of them.
        device: The device of the tensors.
        buffer_bytes: The most bytes that are loaded or being read, and not yet taken.
        ready: True for the order in which they become ready, False for that of the file.

    """

    def __init__(self, plan: LoadPlan, buffer_bytes: int, *, ready: bool) -> None:
        self._device = plan.device
        #: The file, or a view of it that has the parts as its tensors.
        self._read = plan.read
        read = plan.entries()
        #: The number of the tensor of each part that is read.
        self._of = dict(zip(read, plan.numbers_of_entries(), strict=True))
        #: Tensors whose bytes are not in order in the file. They are read last, one by one.
        #: Tensors of ``FakeTensorMode`` are not read at all.
        fake = fake_mode.is_active()
        self._strided = deque(read if fake else self._read.strided(read))
        late = set(self._strided)
        direct = [number for number in read if number not in late] if late else read
        self._read.refuse_without_data(direct)
        device = devices.number(plan.device)
        self._native: TensorIterator | None = self._read.reader.iterate(
            direct, device=device, buffer_bytes=buffer_bytes, ready=ready, complete=False, maps=True
        )

    def __next__(self) -> list[tuple[int, torch.Tensor]]:
        found = None if self._native is None else self._native.next()
        if found is not None:
            handle, numbers = found
            tensors = self._read.placed(take(handle), numbers, self._device)
            return list(zip(map(self._of.__getitem__, numbers), tensors, strict=True))
        self._native = None
        if not self._strided:
            raise StopIteration
        number = self._strided.popleft()
        ((_, tensor, _),) = self._read.load([number], self._device)
        return [(self._of[number], _own(tensor))]

    def end(self) -> None:
        """End the load, for which another thread may be waiting; wait for reads and copies."""
        # Another thread may be loading a strided tensor, which the native iterator does not know.
        self._read.reader.close()
        if (native := self._native) is not None:
            native.close()

    def close(self) -> None:
        """Free the tensors that were loaded and not taken."""
        self._native = None


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares its memory with no other."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if whole else copied(tensor)


def use_on_current_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Make the current stream wait for a tensor's stream, if they differ."""
    # Cheaper than torch.cuda.current_stream, which makes an object for each call.
    if torch._C._cuda_getCurrentStream(tensor.device.index)[0] != stream.stream_id:
        current = torch.cuda.current_stream(tensor.device)
        current.wait_stream(stream)
        tensor.record_stream(current)
